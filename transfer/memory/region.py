"""Registered memory: what transfers may touch, who uses it, where it lies, and what peers may reach of it.

A Region is one contiguous buffer of this process. It counts its users: it is closed when its owner has closed it and nothing moves
in or out any more, so memory is never freed under a transfer. A RemoteRegion is a peer's, as its owner described it. Exports has the
regions that peers may reach, and checks every piece that they name.
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
"""Said of memory of hosts with one NUMA node, and where the kernel does not tell."""
_NODES: Final = Path("/sys/devices/system/node")
_GET_MEMPOLICY: Final = {"x86_64": 239, "aarch64": 236}
"""Its number; the C library has no function for it, and libnuma, which has one, is seldom installed."""
_NODE_OF_ADDRESS: Final = 3
"""MPOL_F_NODE | MPOL_F_ADDR."""
_libc = ctypes.CDLL(None)
CLOSE_TIMEOUT_S: Final = 30.0
"""How long `close` waits for transfers unless told otherwise."""
_ids = itertools.count(1)


def location_of(address: int) -> str:
    """ "cpu:N" of the page at `address`; a page that does not exist yet is made, as by reading it."""
    node = node_of(address) if _count_nodes() > 1 else None
    return ANYWHERE if node is None else f"cpu:{node}"


def node_of(address: int) -> int | None:
    """The NUMA node of the page at `address`. None: the kernel does not tell: a container may not ask, or nothing is mapped there."""
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

    `memory` is flat bytes. `fd` is a descriptor of the shared memory behind it (a memfd that begins at its first byte), or -1: only
    with one can peers of this host map it. The region owns neither: their owner keeps both until `close` has returned.
    `location` is "cpu:N", N a NUMA node: where its first page lies, if it was not named. `read_key` and `write_key` are what a peer
    must show: random, so that a peer reaches only what it was told of. They are made when first asked for: most memory is never shown
    to peers.
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
        # Entered by itself, not through the condition, whose Python code a signal handler's exception could leave locked.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._users = 0
        self._is_closed = False
        self._on_close: list[Callable[[Region], None]] = []

    def part(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """A view of [offset, offset + size). Raises InvalidArgument when the region does not reach that far."""
        self.check(offset_bytes, size_bytes)
        return self.memory[offset_bytes : offset_bytes + size_bytes]

    def check(self, offset_bytes: int, size_bytes: int) -> None:
        """Raises InvalidArgument unless [offset, offset + size) lies within the region."""
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise InvalidArgument(f"bytes {offset_bytes} to {offset_bytes + size_bytes} are outside a region of {self.size_bytes} bytes")

    def hold(self) -> None:
        """One more transfer uses it. Raises Closed."""
        with self._lock:
            if self._is_closed:
                raise Closed(f"region {self.region_id} is closed")
            self._users += 1

    def release(self) -> None:
        """A transfer that held it is over."""
        with self._lock:
            assert self._users > 0, "released more often than held"
            self._users -= 1
            if self._is_closed and not self._users:  # nobody else waits, and to tell nobody takes 2 us
                self._idle.notify_all()

    def on_close(self, callback: "Callable[[Region], None]") -> None:
        """Call `callback` once the region is closed and no transfer uses it any more: an agent deregisters it then."""
        with self._lock:
            self._on_close.append(callback)

    @cached_property
    def location(self) -> str:
        """Asked for once, when a path or a peer first wants to know: most memory is never asked about."""
        return self._named_location or location_of(self.address)

    @cached_property
    def read_key(self) -> int:
        return int.from_bytes(os.urandom(8), "little") >> 1

    @cached_property
    def write_key(self) -> int:
        """Allows reading too."""
        return int.from_bytes(os.urandom(8), "little") >> 1

    @property
    def users(self) -> int:
        """Transfers that hold it."""
        return self._users

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self, *, deadline_s: float = CLOSE_TIMEOUT_S) -> None:
        """Refuse new transfers and wait for those under way; the memory may be freed afterwards. May be called again.

        Raises DeadlineExceeded: transfers still use the memory, which must stay.
        """
        with Shield() as shield:
            shield.cancels(self._wake)
            with self._lock:
                self._is_closed = True
                if not self._idle.wait_for(lambda: not self._users or shield.raised is not None, deadline_s):
                    raise DeadlineExceeded(f"{self._users} transfers still used region {self.region_id} after {round(deadline_s, 2):g} s")
                if self._users:
                    return  # what a signal handler raised is raised by the shield
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
    """Over a buffer that a caller names in a copy: it closes itself with the transfer that holds it, for nobody else could."""

    def release(self) -> None:
        super().release()
        if not self.users:
            self._close_unused()  # not `close`: its shield would raise what it kept in the midst of the end of a transfer


class RemoteRegion(NamedTuple):
    """A peer's region, as its owner described it. `key` is its read or its write key; `location` is where it lies at its owner, "cpu:N".

    `descriptors` are its agents' own bytes: by transport where they are the same on every rail, else by `on_rail`. Only agents that are
    named reach it. An agent always finds those of the rail that it is to reach by its transport's name (`by_rail`).
    """

    region_id: int
    size_bytes: int
    key: int
    descriptors: dict[str, bytes]
    location: str = ANYWHERE

    def descriptor(self, transport: str, rail: str) -> bytes | None:
        """Of the owner's agent of this transport on that rail; None: it does not reach the region."""
        found = self.descriptors.get(transport)
        return found if found is not None else self.descriptors.get(on_rail(transport, rail))

    def by_rail(self, transport: str, rail: str) -> "RemoteRegion":
        """As an agent is to see it that reaches it by this rail of its owner's."""
        found = self.descriptor(transport, rail)
        return self._replace(descriptors={transport: found} if found is not None else {})


def on_rail(transport: str, rail: str) -> str:
    """The name of what an agent says of a region when agents of its transport on other rails say something else."""
    return f"{transport}@{rail}"


class Piece(NamedTuple):
    """One contiguous copy between a region here and one of the peer; the request says which way."""

    local: Region
    local_offset: int
    remote: RemoteRegion
    remote_offset: int
    size_bytes: int


class Exports:
    """Regions by id. Thread-safe: every step is one of the dictionary's own."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}

    def add(self, region: Region) -> None:
        """Peers that show its keys may reach it until it is closed. A second time is a no-op."""
        if region.region_id not in self._regions:
            self._regions[region.region_id] = region
            region.on_close(self._forget)

    def _forget(self, region: Region) -> None:
        self._regions.pop(region.region_id, None)

    def find(self, region_id: int, key: int, *, writing: bool) -> Region:
        """Raises StaleHandle (no such region, or closed) or Denied (the key does not allow it)."""
        region = self._regions.get(region_id)
        if region is None or region.is_closed:
            raise StaleHandle(f"region {region_id} is not, or no longer, open to peers")
        if key != region.write_key and (writing or key != region.read_key):
            raise Denied(f"this key does not allow {'writing' if writing else 'reading'} region {region_id}")
        if writing and region.memory.readonly:
            raise Denied(f"region {region_id} is read-only")
        return region

    def hold(self, request: ReadRegions | WriteRegions) -> tuple[list[memoryview], Sequence[Region]]:
        """The memory of every piece in order, and the regions that are held for it: release each when the bytes have moved.

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
