"""Memory registered by the caller: each transport of the engine registers it once, at first use. Other memory is
registered for every transfer, by transports that need it."""

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
    """A registered buffer; a context manager that closes it. Created by `Client.register`."""

    def __init__(self, region: Region, owner: "Registry") -> None:
        self._region = region
        self._owner = owner

    def close(self) -> None:
        """Unregister the buffer; returns when no transfer uses it. A second close is a no-op.

        Raises DeadlineExceeded if transfers still use it after 30 s; the buffer must stay.
        """
        self._owner.remove(self._region)
        self._region.close()

    def __enter__(self) -> "RegisteredMemory":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Registry:
    """Registered memory of one client, found by address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._known: tuple[tuple[int, ...], tuple[Region, ...]] = (), ()
        """Ascending addresses and their regions; replaced as a whole, so that readers need no lock."""

    def add(self, buffer: Any, location: str) -> RegisteredMemory:
        """Register a buffer. Raises InvalidArgument (no host memory, empty, or overlapping registered memory),
        Closed."""
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
        """The copies, with ends in registered memory replaced by spans of its regions."""
        if not self._known[0]:
            return copies
        return [(self._end(source, size), self._end(destination, size), size) for source, destination, size in copies]

    def _end(self, end: "End", size_bytes: int) -> "End":
        from kvstore.transfer.paths.batch import Span  # loaded already, with the engine

        if not isinstance(end, memoryview):
            return end
        addresses, regions = self._known
        address = int(np.frombuffer(end, np.uint8).ctypes.data)
        at = bisect_right(addresses, address) - 1
        if at < 0 or address + size_bytes > addresses[at] + regions[at].size_bytes:
            return end
        return Span(regions[at], address - addresses[at])

    def close(self) -> None:
        """Unregister everything; called when the engine is closed. A second close is a no-op."""
        with self._lock:
            self._is_closed = True
            regions = self._known[1]
            self._set(())
        for region in regions:
            region.close()
