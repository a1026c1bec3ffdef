"""Destinations of a get's values: new bytes objects, or the caller's buffers in one part or several."""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.client.core.buffers import Destination, fresh_bytes, too_small
from kvstore.client.memory import Parts, first_bytes
from kvstore.protocol.errors import InvalidArgument, KVStoreError

R = TypeVar("R")
Rows = npt.NDArray[np.uint8]
Indexes = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class Sink(Protocol[R]):
    """Destinations of one operation, by key index."""

    rows: Rows | None
    """All buffers as one array of shape (keys, bytes), if they are one."""

    def buffer(self, index: int, size_bytes: int) -> Parts:
        """Writable parts of `size_bytes` in total, the same memory each time. Raises InvalidArgument if the buffer is
        too small."""

    def done(self, index: int, size_bytes: int) -> None:
        """The value is in its buffer, verified."""

    def done_many(self, indexes: Indexes, sizes: Words) -> None:
        """`done` for many values."""

    def failed(self, index: int, error: KVStoreError) -> None:
        """The value exists and could not be read: raises `error`, or keeps it as the key's result."""

    def results(self) -> list[R | None]:
        """Result per key, None for a miss."""


class _OneByOne:
    """Base of sinks that handle values one by one and raise their errors."""

    rows: Rows | None = None

    def done(self, index: int, size_bytes: int) -> None:
        raise NotImplementedError

    def done_many(self, indexes: Indexes, sizes: Words) -> None:
        for index, size in zip(indexes.tolist(), sizes.tolist(), strict=True):
            self.done(index, size)

    def failed(self, index: int, error: KVStoreError) -> None:
        raise error


class FreshBytes(_OneByOne):
    """New bytes objects."""

    def __init__(self, count: int) -> None:
        self._values: list[tuple[bytes, memoryview] | None] = [None] * count
        self._done: list[bytes | None] = [None] * count

    def buffer(self, index: int, size_bytes: int) -> Parts:
        value = self._values[index]
        if value is None or len(value[1]) != size_bytes:
            value = self._values[index] = fresh_bytes(size_bytes)
        return (value[1],)

    def done(self, index: int, size_bytes: int) -> None:
        value = self._values[index]
        self._done[index] = value[0] if value is not None else None  # the value of a view stays in place

    def results(self) -> list[bytes | None]:
        return self._done


class FreshEach(FreshBytes):
    """As FreshBytes, with errors kept per value."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._errors: dict[int, KVStoreError] = {}

    def failed(self, index: int, error: KVStoreError) -> None:
        self._errors[index] = error

    def result(self, index: int) -> tuple[bytes | None, KVStoreError | None]:
        """The value, or else its error, if known."""
        return self._done[index], self._errors.get(index)


class IntoBuffers(_OneByOne):
    """The caller's buffers; results are sizes."""

    def __init__(self, destinations: Sequence[Destination]) -> None:
        self._destinations = destinations
        self._sizes: list[int | None] = [None] * len(destinations)

    def buffer(self, index: int, size_bytes: int) -> Parts:
        destination = self._destinations[index]
        buffer_bytes = destination.size_bytes
        if buffer_bytes < size_bytes:
            raise too_small(index, buffer_bytes, size_bytes)
        return destination.parts if buffer_bytes == size_bytes else first_bytes(destination.parts, size_bytes)

    def done(self, index: int, size_bytes: int) -> None:
        finish = self._destinations[index].finish
        if finish is not None:
            finish()
        self._sizes[index] = size_bytes

    def results(self) -> list[int | None]:
        return self._sizes


class IntoEach(_OneByOne):
    """As IntoBuffers, with errors as results of their keys."""

    def __init__(self, destinations: Sequence[Destination | InvalidArgument]) -> None:
        """An error in place of a destination is the result of its key, which is not read."""
        self._destinations = destinations
        self._results: list[int | KVStoreError | None] = [found if isinstance(found, InvalidArgument) else None for found in destinations]
        self._spare: dict[int, memoryview] = {}
        """Buffers for values that do not fit theirs: they are read nevertheless, and dropped."""

    def buffer(self, index: int, size_bytes: int) -> Parts:
        destination = self._destinations[index]
        assert isinstance(destination, Destination), "a key that is not to be read was read"
        buffer_bytes = destination.size_bytes
        if buffer_bytes >= size_bytes:
            return destination.parts if buffer_bytes == size_bytes else first_bytes(destination.parts, size_bytes)
        spare = self._spare.get(index)
        if spare is None or len(spare) != size_bytes:
            spare = self._spare[index] = memoryview(bytearray(size_bytes))
        return (spare,)

    def done(self, index: int, size_bytes: int) -> None:
        destination = self._destinations[index]
        assert isinstance(destination, Destination)
        if size_bytes > destination.size_bytes:
            self._spare.pop(index, None)
            self._results[index] = too_small(index, destination.size_bytes, size_bytes)
            return
        if destination.finish is not None:
            destination.finish()
        self._results[index] = size_bytes

    def failed(self, index: int, error: KVStoreError) -> None:
        self._results[index] = error

    def ended(self, error: KVStoreError) -> None:
        """The get failed: every key without a result gets this error."""
        self._results = [error if result is None else result for result in self._results]

    def results(self) -> list[int | KVStoreError | None]:
        return self._results


class IntoRows(_OneByOne):
    """Rows of one array; results are sizes."""

    def __init__(self, rows: Rows) -> None:
        self.rows: Rows | None = rows
        self._rows = rows
        self._sizes: list[int | None] = [None] * len(rows)

    def buffer(self, index: int, size_bytes: int) -> Parts:
        row_bytes = self._rows.shape[1]
        if row_bytes < size_bytes:
            raise too_small(index, row_bytes, size_bytes)
        return (self._rows[index, :size_bytes].data,)

    def done(self, index: int, size_bytes: int) -> None:
        self._sizes[index] = size_bytes

    def done_many(self, indexes: Indexes, sizes: Words) -> None:
        if len(indexes) == len(self._sizes):
            self._sizes = sizes.tolist()  # all keys, hence in order
            return
        for index, size in zip(indexes.tolist(), sizes.tolist(), strict=True):
            self._sizes[index] = size

    def results(self) -> list[int | None]:
        return self._sizes


class SinkPart(_OneByOne, Generic[R]):
    """Part of another sink: the buffers of keys `indexes`, in order."""

    def __init__(self, whole: Sink[Any], indexes: Sequence[int]) -> None:
        self._whole = whole
        self._indexes = indexes

    def buffer(self, index: int, size_bytes: int) -> Parts:
        return self._whole.buffer(self._indexes[index], size_bytes)

    def done(self, index: int, size_bytes: int) -> None:
        self._whole.done(self._indexes[index], size_bytes)

    def failed(self, index: int, error: KVStoreError) -> None:
        self._whole.failed(self._indexes[index], error)

    def results(self) -> list[R | None]:
        """Results of the whole sink."""
        return self._whole.results()
