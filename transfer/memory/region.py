"""Registered memory: what transfers may touch, who uses it, and how a peer names it.

A Region is one contiguous buffer of this process. It counts its users: it is closed when its owner has closed it and nothing moves
in or out any more, so memory is never freed under a transfer. A RemoteRegion is a peer's, as its owner described it.
"""

import itertools
import os
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from kvstore.protocol.errors import Closed, DeadlineExceeded, InvalidArgument
from kvstore.transfer.memory.location import ANYWHERE, location_of
from kvstore.transfer.memory.signal_safety import Shield

CLOSE_TIMEOUT_S: Final = 30.0
"""How long `close` waits for transfers unless told otherwise."""
_ids = itertools.count(1)


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
