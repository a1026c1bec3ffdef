"""Slabs of local nodes, mapped into this process and kept.

A copy into or out of a mapped page costs a memcpy, the first touch of a page ten times that: pages are mapped all at once, and ahead.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvstore.protocol.errors import Broken, StaleHandle

MADV_POPULATE_READ: Final = 22
"""Enough to write as well: shared memory has no write notification, so a page mapped for reading takes writes without a fault. Reading
faults 16 pages at once: 64 MiB take 3.7 ms, with MADV_POPULATE_WRITE 11.6 ms."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class SlabKey(NamedTuple):
    """`epoch` tells one process of a node from the next: slab ids begin anew."""

    node_id: int
    epoch: int
    slab: int
    writable: bool


@dataclass(frozen=True, slots=True)
class Slab:
    """A mapped slab. Memory views cut from `memory` keep the mapping alive."""

    memory: memoryview

    def part(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Raises Broken when the slab does not reach that far."""
        if offset_bytes + size_bytes > len(self.memory):
            raise Broken(f"a node named bytes {offset_bytes} to {offset_bytes + size_bytes} of a slab of {len(self.memory)} bytes")
        return self.memory[offset_bytes : offset_bytes + size_bytes]


def map_slab(fd: int, size_bytes: int, *, writable: bool) -> Slab:
    """Map the shared memory of `fd`, all pages present, and close `fd`. Raises Broken.

    mmap.mmap would keep a descriptor open for each slab; a big tier has thousands. Both calls let other threads run.
    """
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, size_bytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise Broken(f"cannot map a slab of {size_bytes} bytes: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)
    owner: Any = (ctypes.c_ubyte * size_bytes).from_address(address)
    weakref.finalize(owner, _libc.munmap, address, size_bytes).atexit = False
    # Kernels before 5.14 refuse it: pages then come with their first use.
    _libc.madvise(address, size_bytes, MADV_POPULATE_READ)
    view = memoryview(owner).cast("B")
    return Slab(view if writable else view.toreadonly())


class SlabCache:
    """Mapped slabs by key, and those that a background thread is mapping. Thread-safe.

    Slabs stay until their node's process ends: they are the node's memory, not this process's.
    """

    def __init__(self) -> None:
        self._slabs: dict[SlabKey, Slab] = {}
        self._coming: dict[SlabKey, Future[None]] = {}
        self._lock = threading.Lock()

    def get(self, keys: Sequence[SlabKey]) -> list[Slab]:
        """Raises StaleHandle when one is not there: the node's process ended meanwhile."""
        try:
            return [self._slabs[key] for key in keys]
        except KeyError as error:
            raise StaleHandle(f"{error.args[0]} is gone") from None

    def missing(self, keys: Sequence[SlabKey]) -> list[SlabKey]:
        """Which of `keys` are not mapped, each once."""
        missing = [key for key in keys if key not in self._slabs]
        return list(dict.fromkeys(missing)) if missing else missing

    def coming(self, keys: Sequence[SlabKey]) -> "list[Future[None]]":
        """What to wait for before asking for `keys`."""
        with self._lock:
            return [self._coming[key] for key in keys if key in self._coming]

    def map_now(self, found: "Sequence[tuple[SlabKey, int, int]]") -> None:
        """Map (key, descriptor, size) and close every descriptor. Slabs of the node's earlier processes are dropped. Raises Broken."""
        left = list(found)
        try:
            while left:
                key, fd, size_bytes = left.pop()
                self._add(key, map_slab(fd, size_bytes, writable=key.writable))
        finally:
            for _, fd, _ in left:
                os.close(fd)

    def announce(self, keys: Sequence[SlabKey]) -> None:
        """`map_announced` will be called for these soon, in another thread."""
        with self._lock:
            for key in keys:
                self._coming[key] = Future()

    def map_announced(self, found: "Sequence[tuple[SlabKey, int, int]]") -> None:
        """Map announced slabs. One that cannot be mapped is left to whoever needs it."""
        for key, fd, size_bytes in found:
            with contextlib.suppress(Broken):
                self._add(key, map_slab(fd, size_bytes, writable=key.writable))
            with self._lock:
                self._coming.pop(key).set_result(None)

    def _add(self, key: SlabKey, slab: Slab) -> None:
        with self._lock:
            for old in [old for old in self._slabs if old.node_id == key.node_id and old.epoch != key.epoch]:
                del self._slabs[old]
            self._slabs[key] = slab
            if key.writable:
                # One mapping serves both: a second one would fault the same pages in again, 60 ms a GiB.
                self._slabs[key._replace(writable=False)] = Slab(slab.memory.toreadonly())

    def clear(self) -> None:
        """Forget every mapping; views of it keep theirs."""
        with self._lock:
            self._slabs.clear()

    def __len__(self) -> int:
        return len(self._slabs)
