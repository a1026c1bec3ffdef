"""Registered memory: regions of this process, descriptions of peers' regions, and the table of exported regions.

A Region is a contiguous buffer with a reference count: it is closed once its owner closed it and no transfer uses it,
so memory is never freed during a transfer. Exports holds the regions that peers may access, and checks keys and bounds
of every piece they request.
"""

import ctypes
import itertools
import os
import platform
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from kvstore.protocol.errors import Closed, DeadlineExceeded, Denied, InvalidArgument, StaleHandle
from kvstore.protocol.transfers import ReadRegions, WriteRegions
from kvstore.transfer.memory.signal_safety import Shield

ANYWHERE: Final = "cpu:0"
"""Location on hosts with one NUMA node, or if the kernel does not report one."""
_NODES: Final = Path("/sys/devices/system/node")
_GET_MEMPOLICY: Final = {"x86_64": 239, "aarch64": 236}
"""System call numbers: the C library has no wrapper, and libnuma, which has one, is rarely installed."""
_NODE_OF_ADDRESS: Final = 3
"""MPOL_F_NODE | MPOL_F_ADDR."""
_libc = ctypes.CDLL(None)
CLOSE_TIMEOUT_S: Final = 30.0
"""Default timeout of `close`."""
_ids = itertools.count(1)


def location_of(address: int) -> str:
    """Return "cpu:N" of the page at `address`; an absent page is allocated, as by a read."""
    node = node_of(address) if _count_nodes() > 1 else None
    return ANYWHERE if node is None else f"cpu:{node}"


def node_of(address: int) -> int | None:
    """Return the NUMA node of the page at `address`, or None: the system call is not permitted (containers), or the
    page is not mapped.
    """
    number, node = _GET_MEMPOLICY.get(platform.machine()), ctypes.c_int(-1)
    if number is None:
        return None
    failed = _libc.syscall(
        ctypes.c_long(number), ctypes.byref(node), None, ctypes.c_ulong(0), ctypes.c_void_p(address), ctypes.c_ulong(_NODE_OF_ADDRESS)
    )
    return None if failed else node.value


@lru_cache(maxsize=1)
def _count_nodes() -> int:
    return sum(1 for _ in _NODES.glob("node[0-9]*"))


class Region:
    """Memory of this process that transfers may read and, if it is writable, write. Thread-safe.

    - `memory` is flat bytes. `fd` is a descriptor of the shared memory that begins at its first byte, or -1; only with
      one can peers of this
      host map it. The region owns neither: the owner keeps both until `close` returns.
    - `location` is "cpu:N", with the NUMA node of its first page, unless given.
    - `read_key` and `write_key` are random capabilities that a peer must present. They are generated on first use: most
      memory is never
      exported.
    """

    def __init__(self, memory: memoryview, *, location: str = "", fd: int = -1) -> None:
        """Raises InvalidArgument unless `memory` is flat, contiguous and not empty."""
        if memory.ndim != 1 or memory.format != "B" or not memory.c_contiguous or not len(memory):
            raise InvalidArgument("a region is a flat, contiguous view of at least one byte")
        self.region_id = next(_ids)
        self.memory = memory
        self.size_bytes = len(memory)
        self.address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self._named_location = location
        self.fd = fd
        # Locked directly, not through the condition: its Python code could be interrupted by a signal handler and leave it locked.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._users = 0
        self._is_closed = False
        self._on_close: list[Callable[[Region], None]] = []

    def part(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a view of [offset, offset + size). Raises InvalidArgument if it exceeds the region."""
        self.check(offset_bytes, size_bytes)
        return self.memory[offset_bytes : offset_bytes + size_bytes]

    def check(self, offset_bytes: int, size_bytes: int) -> None:
        """Raises InvalidArgument unless [offset, offset + size) lies within the region."""
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise InvalidArgument(f"bytes {offset_bytes} to {offset_bytes + size_bytes} are outside a region of {self.size_bytes} bytes")

    def hold(self) -> None:
        """Increment the reference count for a transfer. Raises Closed."""
        with self._lock:
            if self._is_closed:
                raise Closed(f"region {self.region_id} is closed")
            self._users += 1

    def release(self) -> None:
        """Decrement the reference count."""
        with self._lock:
            assert self._users > 0, "released more often than held"
            self._users -= 1
            if self._is_closed and not self._users:  # only `close` waits; a notify without waiters takes 2 us
                self._idle.notify_all()

    def on_close(self, callback: "Callable[[Region], None]") -> None:
        """Call `callback` once the region is closed and unused, for agents to deregister it."""
        with self._lock:
            self._on_close.append(callback)

    @cached_property
    def location(self) -> str:
        """Determined on first use, as most memory is never queried."""
        return self._named_location or location_of(self.address)

    @cached_property
    def read_key(self) -> int:
        return int.from_bytes(os.urandom(8), "little") >> 1

    @cached_property
    def write_key(self) -> int:
        """Also permits reading."""
        return int.from_bytes(os.urandom(8), "little") >> 1

    @property
    def users(self) -> int:
        """Number of transfers that hold it."""
        return self._users

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self, *, deadline_s: float = CLOSE_TIMEOUT_S) -> None:
        """Refuse new transfers and wait for those in flight; the memory may be freed afterwards. Idempotent.

        Raises DeadlineExceeded: transfers still use the memory, which must stay.
        """
        with Shield() as shield:
            shield.cancels(self._wake)
            with self._lock:
                self._is_closed = True
                if not self._idle.wait_for(lambda: not self._users or shield.raised is not None, deadline_s):
                    raise DeadlineExceeded(f"{self._users} transfers still used region {self.region_id} after {round(deadline_s, 2):g} s")
                if self._users:
                    return  # the shield raises the signal handler's exception
            self._close_unused()

    def _close_unused(self) -> None:
        with self._lock:
            self._is_closed = True
            callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback(self)

    def _wake(self) -> None:
        with self._lock:
            self._idle.notify_all()


class PlainRegion(Region):
    """Region over a buffer that a caller names in a copy. Closes itself with the transfer that holds it, as it has no
    other owner.
    """

    def release(self) -> None:
        super().release()
        if not self.users:
            self._close_unused()  # not `close`: its shield could raise in the middle of Transfer.complete


class RemoteRegion(NamedTuple):
    """A peer's region, as its owner described it. `key` is its read or write key; `location` is its "cpu:N" at the
    owner.

    `descriptors` holds its agents' bytes: by transport if they are equal on all rails, else by `on_rail`. Only the
    agents named there can reach it. An agent finds the bytes for its rail under the transport's name (`by_rail`).
    """

    region_id: int
    size_bytes: int
    key: int
    descriptors: dict[str, bytes]
    location: str = ANYWHERE

    def descriptor(self, transport: str, rail: str) -> bytes | None:
        """Return the bytes of the owner's agent of this transport on that rail, or None if it does not reach the
        region.
        """
        found = self.descriptors.get(transport)
        return found if found is not None else self.descriptors.get(on_rail(transport, rail))

    def by_rail(self, transport: str, rail: str) -> "RemoteRegion":
        """Return the region with the descriptor for this rail of its owner only."""
        found = self.descriptor(transport, rail)
        return self._replace(descriptors={transport: found} if found is not None else {})


def on_rail(transport: str, rail: str) -> str:
    """Return the descriptor name for transports whose rails have different descriptors."""
    return f"{transport}@{rail}"


class Piece(NamedTuple):
    """One contiguous copy between a local region and a peer's; the request has the direction."""

    local: Region
    local_offset: int
    remote: RemoteRegion
    remote_offset: int
    size_bytes: int


class Exports:
    """Exported regions by id. Thread-safe: each step is one atomic dictionary operation."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}

    def add(self, region: Region) -> None:
        """Export a region until it is closed. Idempotent."""
        if region.region_id not in self._regions:
            self._regions[region.region_id] = region
            region.on_close(self._forget)

    def _forget(self, region: Region) -> None:
        self._regions.pop(region.region_id, None)

    def find(self, region_id: int, key: int, *, writing: bool) -> Region:
        """Return the region. Raises StaleHandle (unknown or closed) or Denied (the key does not permit it)."""
        region = self._regions.get(region_id)
        if region is None or region.is_closed:
            raise StaleHandle(f"region {region_id} is not, or no longer, open to peers")
        if key != region.write_key and (writing or key != region.read_key):
            raise Denied(f"this key does not allow {'writing' if writing else 'reading'} region {region_id}")
        if writing and region.memory.readonly:
            raise Denied(f"region {region_id} is read-only")
        return region

    def hold(self, request: ReadRegions | WriteRegions) -> tuple[list[memoryview], Sequence[Region]]:
        """Return the memory of every piece in order, and the regions held for it; release each when the bytes have
        moved.

        Raises StaleHandle, Denied, InvalidArgument; nothing is held then.
        """
        writing = isinstance(request, WriteRegions)
        views: list[memoryview] = []
        held: list[Region] = []
        known: dict[tuple[int, int], Region] = {}
        try:
            for region_id, key, offset, size in zip(request.regions, request.keys, request.offsets, request.sizes, strict=True):
                region = known.get((region_id, key))
                if region is None:
                    region = known[region_id, key] = self.find(region_id, key, writing=writing)
                    region.hold()
                    held.append(region)
                if offset + size > region.size_bytes:
                    raise InvalidArgument(
                        f"bytes {offset} to {offset + size} are outside region {region_id}, which has {region.size_bytes} bytes"
                    )
                views.append(region.memory[offset : offset + size])
        except Closed:
            release(held)
            raise StaleHandle(f"region {region_id} is closed") from None
        except BaseException:
            release(held)
            raise
        return views, held


def release(regions: Sequence[Region]) -> None:
    for region in regions:
        region.release()
