"""Memory that the caller has registered: every agent of the transfer engine registers it once, at its first use, and keeps it so. What is
read into or written from other memory is registered anew for each transfer, by transports that have to."""

import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.client.core.buffers import as_memory
from kvstore.protocol.errors import Closed, InvalidArgument
from kvstore.transfer.memory.region import Region

if TYPE_CHECKING:
    from kvstore.transfer.paths.batch import Copy, End


class RegisteredMemory:
    """A buffer until it is closed: a context manager that closes it. Made by `Client.register`."""

    def __init__(self, region: Region, owner: "Registry") -> None:
        self._region = region
        self._owner = owner

    def close(self) -> None:
        """Let go of the buffer; returns when nothing moves in or out of it any more. A second close is a no-op.

        Raises DeadlineExceeded: after 30 s transfers still use it, and the buffer must stay.
        """
        self._owner.remove(self._region)
        self._region.close()

    def __enter__(self) -> "RegisteredMemory":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Registry:
    """The registered memory of one client, found by address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._known: tuple[tuple[int, ...], tuple[Region, ...]] = (), ()
        """Addresses, rising, and the regions there: replaced as a whole, so that nobody waits to look."""

    def add(self, buffer: Any, location: str) -> RegisteredMemory:
        """Raises InvalidArgument: no memory of this host, empty, or some of it is registered already; Closed."""
        memory = as_memory(buffer)
        if not len(memory):
            raise InvalidArgument("a buffer of 0 bytes has nothing to register")
        region = Region(memory, location=location)
        with self._lock:
            if self._is_closed:
                raise Closed("the client is closed")
            regions = sorted((*self._known[1], region), key=lambda region: region.address)
            if any(one.address + one.size_bytes > other.address for one, other in pairwise(regions)):
                raise InvalidArgument("some of this memory is registered already: close that first")
            self._set(regions)
        return RegisteredMemory(region, self)

    def remove(self, region: Region) -> None:
        with self._lock:
            self._set([other for other in self._known[1] if other is not region])

    def _set(self, regions: Sequence[Region]) -> None:
        self._known = tuple(region.address for region in regions), tuple(regions)

    def named(self, copies: "Sequence[Copy]") -> "Sequence[Copy]":
        """The copies, with those ends that lie in registered memory called by its regions."""
        if not self._known[0]:
            return copies
        return [(self._end(source, size), self._end(destination, size), size) for source, destination, size in copies]

    def _end(self, end: "End", size_bytes: int) -> "End":
        from kvstore.transfer.paths.batch import Span  # loaded by then: there is an engine

        if not isinstance(end, memoryview):
            return end
        addresses, regions = self._known
        address = int(np.frombuffer(end, np.uint8).ctypes.data)
        at = bisect_right(addresses, address) - 1
        if at < 0 or address + size_bytes > addresses[at] + regions[at].size_bytes:
            return end
        return Span(regions[at], address - addresses[at])

    def close(self) -> None:
        """Let go of all of it; for when the engine is closed. A second close is a no-op."""
        with self._lock:
            self._is_closed = True
            regions = self._known[1]
            self._set(())
        for region in regions:
            region.close()
