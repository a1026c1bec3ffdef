"""Where the values of a get go: new bytes objects, or the caller's buffers."""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import Destination, fresh_bytes, too_small

R = TypeVar("R")
Rows = npt.NDArray[np.uint8]
Indexes = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class Sink(Protocol[R]):
    """Where the values of one operation go, by the index of their key."""

    rows: Rows | None
    """All rooms as one array of shape (keys, bytes), where they are one."""

    def room(self, index: int, size_bytes: int) -> memoryview:
        """A writable view of `size_bytes`, the same one each time. Raises InvalidArgument when there is not as much."""

    def done(self, index: int, size_bytes: int) -> None:
        """The value is in its room and is right."""

    def done_many(self, indexes: Indexes, sizes: Words) -> None:
        """As `done`, for many values."""

    def results(self) -> list[R | None]:
        """One a key, None for a miss."""


class FreshBytes:
    """Values become new bytes objects."""

    rows: Rows | None = None

    def __init__(self, count: int) -> None:
        self._values: list[tuple[bytes, memoryview] | None] = [None] * count
        self._done: list[bytes | None] = [None] * count

    def room(self, index: int, size_bytes: int) -> memoryview:
        value = self._values[index]
        if value is None or len(value[1]) != size_bytes:
            value = self._values[index] = fresh_bytes(size_bytes)
        return value[1]

    def done(self, index: int, size_bytes: int) -> None:
        value = self._values[index]
        self._done[index] = value[0] if value is not None else None  # a view's value stays where it is

    def done_many(self, indexes: Indexes, sizes: Words) -> None:
        for index, size in zip(indexes.tolist(), sizes.tolist(), strict=True):
            self.done(index, size)

    def results(self) -> list[bytes | None]:
        return self._done


class IntoBuffers:
    """Values go to the caller's buffers; the results are sizes."""

    rows: Rows | None = None

    def __init__(self, destinations: Sequence[Destination]) -> None:
        self._destinations = destinations
        self._sizes: list[int | None] = [None] * len(destinations)

    def room(self, index: int, size_bytes: int) -> memoryview:
        view = self._destinations[index].view
        if len(view) < size_bytes:
            raise too_small(index, len(view), size_bytes)
        return view if len(view) == size_bytes else view[:size_bytes]

    def done(self, index: int, size_bytes: int) -> None:
        finish = self._destinations[index].finish
        if finish is not None:
            finish()
        self._sizes[index] = size_bytes

    def done_many(self, indexes: Indexes, sizes: Words) -> None:
        for index, size in zip(indexes.tolist(), sizes.tolist(), strict=True):
            self.done(index, size)

    def results(self) -> list[int | None]:
        return self._sizes


class IntoRows:
    """Values go to the rows of one array of the caller's; the results are sizes."""

    def __init__(self, rows: Rows) -> None:
        self.rows: Rows | None = rows
        self._rows = rows
        self._sizes: list[int | None] = [None] * len(rows)

    def room(self, index: int, size_bytes: int) -> memoryview:
        row_bytes = self._rows.shape[1]
        if row_bytes < size_bytes:
            raise too_small(index, row_bytes, size_bytes)
        return self._rows[index, :size_bytes].data

    def done(self, index: int, size_bytes: int) -> None:
        self._sizes[index] = size_bytes

    def done_many(self, indexes: Indexes, sizes: Words) -> None:
        if len(indexes) == len(self._sizes):
            self._sizes = sizes.tolist()  # all of them, so in order
            return
        for index, size in zip(indexes.tolist(), sizes.tolist(), strict=True):
            self._sizes[index] = size

    def results(self) -> list[int | None]:
        return self._sizes


class Part(Generic[R]):
    """Some keys' rooms in another sink: those of `indexes`, in order."""

    rows: Rows | None = None

    def __init__(self, whole: Sink[Any], indexes: Sequence[int]) -> None:
        self._whole = whole
        self._indexes = indexes

    def room(self, index: int, size_bytes: int) -> memoryview:
        return self._whole.room(self._indexes[index], size_bytes)

    def done(self, index: int, size_bytes: int) -> None:
        self._whole.done(self._indexes[index], size_bytes)

    def done_many(self, indexes: Indexes, sizes: Words) -> None:
        for index, size in zip(indexes.tolist(), sizes.tolist(), strict=True):
            self.done(index, size)

    def results(self) -> list[R | None]:
        """Of the keys that the whole was made for."""
        return self._whole.results()
