"""Memory that other processes can map: one memfd (Memfd), and the pool that backs the slabs of the DRAM tier with them (MemfdPool).

Neither knows slots. The first write of a memfd page is some ten times slower than later ones (0.4-0.7 against 9 GB/s measured),
so the pool makes its memory at the start and faults it in step by step, in a thread of the caller's, and later what it makes anew.
"""

import ctypes
import fcntl
import mmap
import os
import resource
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import ConfigError, TierFailed
from kvstore.protocol.settings import format_size
from kvstore.tiers.huge_pages import HUGE_PAGE_BYTES, map_with_huge_pages

Bytes = npt.NDArray[np.uint8]

PAGE_BYTES = mmap.PAGESIZE

MFD_HUGETLB = 0x4
"""linux/memfd.h; the os module has it only from Python 3.13 on some builds."""

MADV_POPULATE_WRITE = 23
"""linux/mman.h, Linux 5.14: fault pages in for writing without changing a byte."""

MADV_REMOVE = 9
"""linux/mman.h: free these pages of shared memory, whoever maps them."""

PREFAULT_CHUNK_BYTES = 2 << 20
"""How much is faulted in under one lock: a slab being assigned, or a new mapping, waits for it at most some 5 ms."""

MAX_MEMFDS = 8192
"""Memfds of one pool: each is two descriptors (Python's mmap keeps one of its own) and a mapping, or one descriptor and three mappings
(huge_pages.map_asking), of which the system allows so many (RLIMIT_NOFILE; 65,530 mappings). It is twice what slabs of 1/4096 of a tier
come to; beyond it there is no memory for a further slab before another is given up."""

MAX_TRIM = 2
"""Memory is cut down to at least 1/2 for a smaller slab, and a slab has at least 1/2 of the slots that it wanted where warm memory holds no
more: otherwise memory is made anew, whose first write takes ten times as long."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Memfd:
    """`size_bytes` of shared memory, mapped read-write in this process as `bytes` (uint8, one dimension).

    The file keeps the size that it was made with, sealed: no process that maps it can lose pages under its feet. Pages behind a smaller
    size go back to the system with `trim`. That and `touch` may be called from another thread than the rest. Views taken of `bytes`
    keep the mapping alive after `close`.
    """

    def __init__(self, size_bytes: int, *, hugepages: bool = False, transparent_hugepages: bool = True) -> None:
        """With `hugepages` it is in those that are reserved; with `transparent_hugepages` it asks for those that the kernel gives by itself.

        Raises OSError: no descriptor, memory or (with `hugepages`) huge page is left.
        """
        self.page_bytes = HUGE_PAGE_BYTES if hugepages else PAGE_BYTES
        self.tenant: str | None = None
        """Whose bytes are or were in it; None while it is as the kernel made it."""
        self._lock = threading.Lock()
        self.fd = os.memfd_create("kvstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (MFD_HUGETLB if hugepages else 0))
        try:
            # Another user's process that was given a read-only descriptor must not open the file again for writing.
            os.fchmod(self.fd, 0o400)
            os.ftruncate(self.fd, self.file_bytes(size_bytes))
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            mapped = self._map(self.file_bytes(size_bytes), transparent_hugepages=transparent_hugepages and not hugepages)
        except OSError:
            os.close(self.fd)
            raise
        self._whole: Bytes = np.frombuffer(mapped, np.uint8)
        self.bytes: Bytes = self._whole[:size_bytes]
        self._touched_bytes = 0

    def _map(self, size_bytes: int, *, transparent_hugepages: bool) -> mmap.mmap | memoryview:
        """Memory that holds no whole huge page does not ask: mapped plainly it costs one mapping, not three."""
        if transparent_hugepages and size_bytes >= HUGE_PAGE_BYTES:
            return map_with_huge_pages(self.fd, size_bytes)
        return mmap.mmap(self.fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)

    @property
    def size_bytes(self) -> int:
        return len(self.bytes)

    @property
    def max_bytes_of(self) -> int:
        """What `resize` can make it. Memory in reserved huge pages does not grow: a page that was given back may be another's."""
        return len(self._whole) if self.page_bytes == PAGE_BYTES else self.file_bytes(self.size_bytes)

    @property
    def untouched_bytes(self) -> int:
        """What `touch` has still to fault in."""
        return max(0, self.size_bytes - self._touched_bytes)

    def file_bytes(self, size_bytes: int) -> int:
        """The size of a file that holds `size_bytes`: whole pages."""
        return -(-size_bytes // self.page_bytes) * self.page_bytes

    def resize(self, size_bytes: int) -> None:
        """Use the first `size_bytes`, at most `max_bytes_of`. `trim` is to be called where they are fewer than before. It waits for no
        `touch` that is under way."""
        self.bytes = self._whole[:size_bytes]
        self._touched_bytes = min(self._touched_bytes, self.file_bytes(size_bytes))

    def trim(self) -> None:
        """Give the pages behind those in use back to the system: they read as zeros, for others that map them too."""
        with self._lock:
            self._remove(self.file_bytes(self.size_bytes))

    def _remove(self, begin_bytes: int) -> None:
        if begin_bytes < len(self._whole):
            _libc.madvise(self._whole.ctypes.data + begin_bytes, len(self._whole) - begin_bytes, MADV_REMOVE)

    def export(self, *, writable: bool) -> int:
        """A new descriptor, owned by the caller, to pass to another process."""
        if writable:
            return os.dup(self.fd)
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def touch(self, max_bytes: int) -> int:
        """Fault in the next `max_bytes`, as far as there are so many; returns how many were left to fault in before. Changes no byte; best
        effort."""
        with self._lock:
            left_bytes, begin = self.untouched_bytes, self._touched_bytes
            target = self.bytes[begin : begin + max_bytes] if left_bytes else self.bytes[:0]
            if target.size and _libc.madvise(target.ctypes.data, target.size, MADV_POPULATE_WRITE):
                # Older kernels: reading a page of shared memory makes the kernel find and zero it, which is most of the cost.
                target[:: self.page_bytes].max()
            self._touched_bytes = min(begin + self.file_bytes(target.size), self.file_bytes(self.size_bytes))
        return left_bytes

    def discard(self) -> None:
        """Close it and give its pages back to the system, though others may still map it: they find zeros. Nobody may be using it."""
        with self._lock:
            self._remove(0)
        self.close()

    def close(self) -> None:
        """Forget the memory. The descriptor is closed, the mapping goes with its last view. A second close is a no-op."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
                self.bytes = self._whole = np.empty(0, np.uint8)


class MemfdPool:
    """Backs slabs with memfds, `capacity_bytes` in all, made at the start: slabs of `slab_bytes`, and `first_sizes`, one small slab each
    for the first who want some. A slabs.Backing. It has at most MAX_MEMFDS memfds, and takes at most half of the process's descriptors.

    Memory that held a tenant's bytes serves no other tenant, zeroed or not: an old client may still have it mapped.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        slab_bytes: int,
        first_sizes: Sequence[int] = (),
        hugepages: bool = False,
        transparent_hugepages: bool = True,
    ) -> None:
        """Falls back to normal pages, all of them, where reserved huge ones do not suffice; `transparent_hugepages` as Memfd. Raises ConfigError when the
        system refuses."""
        self.hugepages = hugepages
        self._transparent_hugepages = transparent_hugepages
        self._max_memfds = min(MAX_MEMFDS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._capacity_bytes = capacity_bytes
        self._of_slab: dict[int, Memfd] = {}
        small = first_sizes if sum(first_sizes) <= capacity_bytes and not hugepages else ()
        whole, rest = divmod(capacity_bytes - sum(small), slab_bytes)
        sizes = [*small, *[slab_bytes] * whole, *[rest] * bool(rest)]
        self._spares: deque[Memfd] = deque()
        if hugepages:
            self.hugepages = self._create_spares(sizes) is None
        refusal = None if self.hugepages else self._create_spares(sizes)
        if refusal is not None:
            raise ConfigError(f"cannot make {len(sizes)} slabs of shared memory: {refusal}") from refusal
        self._held_bytes = self._limit_bytes = sum(map(self._charged_bytes, sizes))
        """In whole huge pages, where these are reserved: no more of them are set aside, and what is beyond is nobody's."""
        self.slabs_released = 0
        """Slabs given up since the pool was made."""
        self._cold = deque(self._spares)
        """What `prefault_step` has still to fault in, next first. Slabs' memory goes to the front, some of it so twice."""
        self.has_cold = threading.Event()
        """Set with each memory that is to be faulted in: the thread that calls `prefault_step` may wait for it, and clears it before."""
        self._touching: Memfd | None = None
        self._untrimmed: deque[Memfd] = deque()
        """What `prefault_step` has to give back of, before it faults in more: it takes the loop as long as a small put."""
        self._slab_bytes = slab_bytes

    @property
    def prefaulted_bytes(self) -> int:
        """Of the capacity, less what is still to be faulted in; memory that is made anew for other sizes lowers it for a while."""
        return self._capacity_bytes - sum(memory.untouched_bytes for memory in {self._touching, *self._cold.copy()} if memory is not None)

    def memory(self, slab: int) -> Memfd:
        return self._of_slab[slab]

    def acquire(self, slab: int, slot_bytes: int, count: int, tenant: str) -> int:
        """See Backing. Fewer than `count` where the tenant's warm memory holds no more; 0 where there are as many memfds as may be, or, of
        reserved huge pages, none is left: a slab takes whole ones. Raises TierFailed when the system has no descriptor or mapping left."""
        memory = self._find_spare(slot_bytes, count, tenant) or self._find_larger_spare(count * slot_bytes, tenant)
        if memory is not None:
            count = min(count, self._max_bytes(memory) // slot_bytes)
            self._spares.remove(memory)
            self._resize(memory, count * slot_bytes)
        else:
            memory = self._create(count * slot_bytes)
        if memory is None:
            return 0
        memory.tenant = tenant
        self._of_slab[slab] = memory
        if memory.untouched_bytes:
            self._cold.appendleft(memory)
            self.has_cold.set()
        self._refill()
        return count

    def has_warm(self, slot_bytes: int, count: int, tenant: str) -> bool:
        """See Backing: memory all of which has been faulted in."""
        memory = self._find_spare(slot_bytes, count, tenant)
        return memory is not None and not memory.untouched_bytes

    def release(self, slab: int) -> None:
        self.slabs_released += 1
        # In front: its pages are warm, so it is the one to take next.
        self._spares.appendleft(self._of_slab.pop(slab))

    def prefault_step(self, max_bytes: int) -> bool:
        """Fault in up to `max_bytes` more; whether something is left. One thread at a time, any thread; releases the GIL."""
        while max_bytes > 0:
            while self._untrimmed:
                self._untrimmed.popleft().trim()
            try:
                self._touching = memory = self._cold.popleft()
            except IndexError:
                return False
            step_bytes = min(PREFAULT_CHUNK_BYTES, max_bytes)
            left_bytes = memory.touch(step_bytes)
            if left_bytes > step_bytes:
                self._cold.appendleft(memory)
            self._touching = None
            max_bytes -= min(step_bytes, left_bytes)
        return bool(self._cold)

    def check_integrity(self) -> None:
        """Assert that memory held is memory counted, and no more than the capacity. For tests."""
        held = [*self._spares, *self._of_slab.values()]
        assert sum(self._charged_bytes(memory.size_bytes) for memory in held) == self._held_bytes <= self._limit_bytes

    def close(self) -> None:
        """Close all memory. A second close is a no-op."""
        for memory in (*self._spares, *self._of_slab.values()):
            memory.close()

    def _create_spares(self, sizes: list[int]) -> OSError | None:
        """One spare for each size, or none at all and the system's refusal."""
        try:
            for size_bytes in sizes:
                self._spares.append(Memfd(size_bytes, hugepages=self.hugepages, transparent_hugepages=self._transparent_hugepages))
        except OSError as refusal:
            while self._spares:
                self._spares.pop().close()
            return refusal
        return None

    def _charged_bytes(self, size_bytes: int) -> int:
        """What memory of that size takes of the limit."""
        return -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if self.hugepages else size_bytes

    def _find_spare(self, slot_bytes: int, count: int, tenant: str) -> Memfd | None:
        """The spare for a slab of that many slots, or else of fewer."""
        some = None
        for memory in self._spares:
            if memory.tenant not in (None, tenant):
                continue
            fitting = min(count, self._max_bytes(memory) // slot_bytes)
            if count > MAX_TRIM * fitting or memory.size_bytes > MAX_TRIM * fitting * slot_bytes:
                continue
            if fitting == count:
                return memory
            some = some or memory
        return some

    def _find_larger_spare(self, size_bytes: int, tenant: str) -> Memfd | None:
        """One to be cut down however far: where a spare had to be given up for new memory, which would be cold."""
        if self._held_bytes + self._charged_bytes(size_bytes) <= self._limit_bytes:
            return None
        larger = (memory for memory in reversed(self._spares) if memory.tenant in (None, tenant) and memory.size_bytes >= size_bytes)
        return next(larger, None)

    def _max_bytes(self, memory: Memfd) -> int:
        """What a spare can be made without another one being given up."""
        return min(memory.max_bytes_of, self._charged_bytes(memory.size_bytes) + self._limit_bytes - self._held_bytes)

    def _resize(self, memory: Memfd, size_bytes: int) -> None:
        if size_bytes == memory.size_bytes:
            return
        self._held_bytes += self._charged_bytes(size_bytes) - self._charged_bytes(memory.size_bytes)
        is_trimmed = memory.file_bytes(size_bytes) < memory.file_bytes(memory.size_bytes)
        memory.resize(size_bytes)
        if is_trimmed and self.hugepages:
            memory.trim()  # for they are few, and may be wanted at once
        elif is_trimmed:
            self._untrimmed.append(memory)
            self.has_cold.set()

    def _refill(self) -> None:
        """Make spares of what slabs were trimmed off, so that they are warm when they are wanted. Bytes of one slab are left for small
        slabs: each would have a spare cut down, and the next one made of the rest."""
        with suppress(OSError):
            while (
                self._held_bytes + 2 * self._slab_bytes <= self._limit_bytes and len(self._of_slab) + len(self._spares) < self._max_memfds
            ):
                memory = Memfd(self._slab_bytes, hugepages=self.hugepages, transparent_hugepages=self._transparent_hugepages)
                self._held_bytes += self._charged_bytes(self._slab_bytes)
                self._spares.append(memory)
                self._cold.append(memory)
                self.has_cold.set()

    def _create(self, size_bytes: int) -> Memfd | None:
        """New memory, in the place of spares that suit nobody. None: of those there are too few."""
        cost = self._charged_bytes(size_bytes)
        # The spares at the back were released longest ago or are not faulted in yet.
        while self._held_bytes + cost > self._limit_bytes or len(self._of_slab) + len(self._spares) >= self._max_memfds:
            if not self._spares:
                return None
            dropped = self._spares.pop()
            self._held_bytes -= self._charged_bytes(dropped.size_bytes)
            dropped.discard()
        try:
            memory = Memfd(
                size_bytes, hugepages=self.hugepages, transparent_hugepages=self._transparent_hugepages
            )  # the huge pages just discarded are free for it
        except OSError as refusal:
            raise TierFailed(f"no shared memory of {format_size(size_bytes)}: {refusal}") from refusal
        self._held_bytes += cost
        return memory
