"""Where the values of a get go: new bytes objects, or the caller's buffers."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from kvstore.client.buffers import Destination, fresh_bytes
from kvstore.protocol.errors import InvalidArgument

R = TypeVar("R")


class Sink(Protocol[R]):
    """Where the values of one operation go, by the index of their key."""

    def room(self, index: int, size_bytes: int) -> memoryview:
        """A writable view of `size_bytes`. Raises InvalidArgument when there is not as much."""

    def done(self, index: int, size_bytes: int) -> None:
        """The value is in its room and is right."""

    def results(self) -> list[R | None]:
        """One a key, None for a miss."""


class FreshBytes:
    """Values become new bytes objects."""

    def __init__(self, count: int) -> None:
        self._values: list[bytes | None] = [None] * count
        self._done: list[bytes | None] = [None] * count

    def room(self, index: int, size_bytes: int) -> memoryview:
        self._values[index], view = fresh_bytes(size_bytes)
        return view

    def done(self, index: int, size_bytes: int) -> None:
        self._done[index] = self._values[index]

    def results(self) -> list[bytes | None]:
        return self._done


class IntoBuffers:
    """Values go to the caller's buffers; the results are sizes."""

    def __init__(self, destinations: Sequence[Destination]) -> None:
        self._destinations = destinations
        self._sizes: list[int | None] = [None] * len(destinations)

    def room(self, index: int, size_bytes: int) -> memoryview:
        view = self._destinations[index].view
        if len(view) < size_bytes:
            raise InvalidArgument(f"the buffer of key {index} has {len(view)} bytes, its value has {size_bytes}")
        return view[:size_bytes]

    def done(self, index: int, size_bytes: int) -> None:
        finish = self._destinations[index].finish
        if finish is not None:
            finish()
        self._sizes[index] = size_bytes

    def results(self) -> list[int | None]:
        return self._sizes
