"""Page-aligned memory for direct I/O of values whose own memory is not aligned."""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class AlignedBuffers:
    """Up to `count` buffers of `size_bytes`, each made when it is first needed and kept. Any thread may call it."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._available = threading.BoundedSemaphore(count)
        self._idle: list[mmap.mmap] = []

    @contextmanager
    def lease(self) -> Iterator[memoryview]:
        """One of them for a while. Waits while all are leased: each is for the length of one read or write."""
        with self._available:
            try:
                memory = self._idle.pop()
            except IndexError:
                memory = mmap.mmap(-1, self._size_bytes)
            try:
                yield memoryview(memory)
            finally:
                self._idle.append(memory)


def address_of(buffer: memoryview) -> int:
    """The address of a buffer's first byte. It must not be empty."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
