"""Shared memory of simulated processes, without the kernel: descriptors are numbers, and all mappings share the same bytes.

As memfds, as far as the product uses them: memory lives as long as a descriptor or a mapping of it, a new descriptor is another number for
the same memory. Real ones took a tenth of a run, and what a run that is over had left open stayed open until it was collected.
"""

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final

import numpy as np

from kvstore.protocol.errors import Broken
from kvstore.tiers.memfd import Bytes, Memfd
from kvstore.transfer.memory.mapped_memory import MappedSlab

FIRST_FD: Final = 2_000_000
_OF_PROCESS: Final = "/proc/self/fd/"
BLOCK_BYTES: Final = 512
"""Of stat(2)."""


@dataclass(slots=True)
class _File:
    size_bytes: int = 0
    memory: Bytes | None = None
    """From its first mapping on."""


class Descriptors:
    """Replacement of `os` and `fcntl` for the creation and passing of shared memory.

    Raises OSError for a closed descriptor, since a second close would close another owner's descriptor."""

    F_ADD_SEALS: Final = 0
    F_SEAL_SHRINK: Final = 0
    F_SEAL_GROW: Final = 0
    F_SEAL_SEAL: Final = 0

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._next = FIRST_FD

    def __getattr__(self, name: str) -> object:
        """Once for each: from then on it is a name of its own."""
        value = self.__dict__[name] = getattr(os, name)
        return value

    def memfd_create(self, name: str, flags: int = 0) -> int:
        return self._add(_File())

    def fchmod(self, fd: int, mode: int) -> None:
        self._file(fd)

    def fcntl(self, fd: int, command: int, argument: int = 0) -> int:
        self._file(fd)
        return 0

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        self._file(fd).size_bytes = size_bytes

    def fstat(self, fd: int) -> SimpleNamespace:
        size_bytes = self._file(fd).size_bytes
        return SimpleNamespace(st_size=size_bytes, st_blocks=size_bytes // BLOCK_BYTES)

    def dup(self, fd: int) -> int:
        return self._add(self._file(fd))

    def open(self, path: str, flags: int = 0) -> int:
        return self.dup(int(path.removeprefix(_OF_PROCESS)))

    def close(self, fd: int) -> None:
        self._file(fd)
        del self._files[fd]

    def map(self, fd: int, size_bytes: int) -> Bytes:
        """Raises Broken: there is less memory."""
        file = self._file(fd)
        if not 0 < size_bytes <= file.size_bytes:
            raise Broken(f"cannot map a slab of {size_bytes} bytes: its memory has {file.size_bytes}")
        if file.memory is None:
            file.memory = np.zeros(file.size_bytes, np.uint8)
        return file.memory[:size_bytes]

    def map_slab(self, fd: int, size_bytes: int, *, writable: bool, **_options: bool) -> MappedSlab:
        """kvstore.transfer.memory.mapped_memory.map_slab."""
        try:
            view = self.map(fd, size_bytes).data
        finally:
            self.close(fd)
        return MappedSlab(view if writable else view.toreadonly())

    def _file(self, fd: int) -> _File:
        try:
            return self._files[fd]
        except KeyError:
            raise OSError(9, "Bad file descriptor") from None

    def _add(self, file: _File) -> int:
        fd, self._next = self._next, self._next + 1
        self._files[fd] = file
        return fd


def free_pages(memory: memoryview) -> None:
    """kvstore.transfer.memory.mapped_memory.free_pages: every mapping of the pages reads zeros."""
    np.frombuffer(memory, np.uint8)[:] = 0


class SimMemfd(Memfd):
    """The real one on such memory."""

    def __init__(self, descriptors: Descriptors, size_bytes: int, **options: bool) -> None:
        self._descriptors = descriptors
        super().__init__(size_bytes, **options)

    def _map(self, size_bytes: int, *, transparent_hugepages: bool) -> memoryview:
        return self._descriptors.map(self.fd, size_bytes).data

    def _remove(self, begin_bytes: int) -> None:
        self._whole[begin_bytes:] = 0
