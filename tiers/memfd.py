"""Shared memory of the DRAM tier: Memfd, one mapped memfd, and MemfdPool, which provides slabs with them.

The first write of a memfd page is some ten times slower than later ones (0.4-0.7 against 9 GB/s measured). The pool
therefore allocates its memory at the start, and a thread of the caller prefaults it in steps; memory that is created
later is prefaulted too.
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
"""linux/memfd.h; some builds of the os module have it only from Python 3.13."""

MADV_POPULATE_WRITE = 23
"""linux/mman.h, Linux 5.14: prefault pages for writing without changing a byte."""

MADV_REMOVE = 9
"""linux/mman.h: free these pages of shared memory for all processes that map them."""

PREFAULT_CHUNK_BYTES = 2 << 20
"""Bytes prefaulted under one lock. A new slab or mapping waits at most some 5 ms for it."""

MAX_MEMFDS = 8192
"""Largest number of memfds in a pool. Each takes two descriptors (Python's mmap duplicates one) and a mapping, or one
descriptor and three mappings (huge_pages.map_with_huge_pages); RLIMIT_NOFILE and vm.max_map_count (65,530) bound both.
Twice the number of slabs of 1/4096 of a tier. At the limit a further slab needs the memory of a released one.
"""

MAX_TRIM = 2
"""A spare is trimmed to at least 1/MAX_TRIM of its size, and a slab gets at least 1/MAX_TRIM of its slots from warm
memory. Otherwise memory is created, whose first write takes ten times as long.
"""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Memfd:
    """`size_bytes` of shared memory, mapped read-write as `bytes` (uint8, one dimension).

    The file's size is sealed: a process that maps it cannot get a SIGBUS. `resize` uses less of it and `trim` frees the
    pages behind. `touch` and `trim` may run in another thread than the rest. Views of `bytes` keep the mapping alive
    after `close`.
    """

    def __init__(self, size_bytes: int, *, hugepages: bool = False, transparent_hugepages: bool = True) -> None:
        """`hugepages` uses reserved huge pages; `transparent_hugepages` requests transparent ones.

        Raises OSError: out of descriptors, memory or reserved huge pages.
        """
        self.page_bytes = HUGE_PAGE_BYTES if hugepages else PAGE_BYTES
        self.tenant: str | None = None
        """Tenant whose bytes it holds or held; None while it has never been used."""
        self._lock = threading.Lock()
        self.fd = os.memfd_create("kvstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (MFD_HUGETLB if hugepages else 0))
        try:
            # Another user's process with a read-only descriptor must not be able to reopen the file for writing.
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
        """Map the file. Memory below one huge page is mapped plainly: one mapping instead of three."""
        if transparent_hugepages and size_bytes >= HUGE_PAGE_BYTES:
            return map_with_huge_pages(self.fd, size_bytes)
        return mmap.mmap(self.fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)

    @property
    def size_bytes(self) -> int:
        return len(self.bytes)

    @property
    def max_size_bytes(self) -> int:
        """Largest size for `resize`. Reserved huge pages do not grow back: a freed page may be in use elsewhere."""
        return len(self._whole) if self.page_bytes == PAGE_BYTES else self.file_bytes(self.size_bytes)

    @property
    def untouched_bytes(self) -> int:
        """Bytes that `touch` has not faulted in yet."""
        return max(0, self.size_bytes - self._touched_bytes)

    def file_bytes(self, size_bytes: int) -> int:
        """Return `size_bytes` rounded up to whole pages."""
        return -(-size_bytes // self.page_bytes) * self.page_bytes

    def resize(self, size_bytes: int) -> None:
        """Use the first `size_bytes`, at most `max_size_bytes`. Call `trim` after shrinking. Does not wait for a
        running `touch`.
        """
        self.bytes = self._whole[:size_bytes]
        self._touched_bytes = min(self._touched_bytes, self.file_bytes(size_bytes))

    def trim(self) -> None:
        """Free the pages beyond `size_bytes`. They read as zeros in every process that maps them."""
        with self._lock:
            self._remove(self.file_bytes(self.size_bytes))

    def _remove(self, begin_bytes: int) -> None:
        if begin_bytes < len(self._whole):
            _libc.madvise(self._whole.ctypes.data + begin_bytes, len(self._whole) - begin_bytes, MADV_REMOVE)

    def export(self, *, writable: bool) -> int:
        """Return a new descriptor to pass to another process. The caller owns it."""
        if writable:
            return os.dup(self.fd)
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def touch(self, max_bytes: int) -> int:
        """Fault in up to `max_bytes` more, and return how many bytes were left before. Changes no byte; best effort."""
        with self._lock:
            left_bytes, begin = self.untouched_bytes, self._touched_bytes
            target = self.bytes[begin : begin + max_bytes] if left_bytes else self.bytes[:0]
            if target.size and _libc.madvise(target.ctypes.data, target.size, MADV_POPULATE_WRITE):
                # Older kernels: a read makes the kernel allocate and zero the page, which is most of the cost.
                target[:: self.page_bytes].max()
            self._touched_bytes = min(begin + self.file_bytes(target.size), self.file_bytes(self.size_bytes))
        return left_bytes

    def discard(self) -> None:
        """Close it and free its pages, also for processes that still map them. No slab may use it."""
        with self._lock:
            self._remove(0)
        self.close()

    def close(self) -> None:
        """Close the descriptor. The mapping ends with its last view. A second close is a no-op."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
                self.bytes = self._whole = np.empty(0, np.uint8)


class MemfdPool:
    """Provides slabs with memfds, `capacity_bytes` in all. A slabs.SlabAllocator.

    At the start it creates spares: one of each of `first_sizes` for first slabs, the rest of `slab_bytes`. It has at
    most MAX_MEMFDS memfds and uses at most half of the process's descriptors. Memory that held a tenant's bytes never
    serves another tenant, zeroed or not: a client of the former may still map it.
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
        """Falls back to normal pages if too few huge pages are reserved. Raises ConfigError if the system refuses the
        memory.
        """
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
        """In whole huge pages, where these are reserved: a remainder cannot be used."""
        self.slabs_released = 0
        """Slabs released since the pool was made."""
        self._cold = deque(self._spares)
        """Memory to prefault, in order. Slabs' memory is put in front, so it may occur twice."""
        self.has_cold = threading.Event()
        """Set when memory to prefault is added. The prefault thread clears it before each step and waits for it."""
        self._touching: Memfd | None = None
        self._untrimmed: deque[Memfd] = deque()
        """Memory to trim, done by `prefault_step` before it prefaults: on the event loop a trim takes as long as a
        small put.
        """
        self._slab_bytes = slab_bytes

    @property
    def prefaulted_bytes(self) -> int:
        """Capacity without the bytes still to be prefaulted. Falls when memory is created for other slab sizes."""
        return self._capacity_bytes - sum(memory.untouched_bytes for memory in {self._touching, *self._cold.copy()} if memory is not None)

    def memory(self, slab: int) -> Memfd:
        return self._of_slab[slab]

    def acquire(self, slab: int, slot_bytes: int, count: int, tenant: str) -> int:
        """As SlabAllocator.acquire.

        Returns fewer than `count` slots if the tenant's warm memory holds no more. Returns 0 at the limit of memfds or,
        with reserved huge pages, if no page is left. Raises TierFailed if the system has no descriptor or mapping left.
        """
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
        """As SlabAllocator.has_warm: a spare whose pages are all present."""
        memory = self._find_spare(slot_bytes, count, tenant)
        return memory is not None and not memory.untouched_bytes

    def release(self, slab: int) -> None:
        self.slabs_released += 1
        # In front: its pages are present, so it is used next.
        self._spares.appendleft(self._of_slab.pop(slab))

    def prefault_step(self, max_bytes: int) -> bool:
        """Fault in up to `max_bytes`. Returns whether more is left. Call from one thread at a time; releases the GIL."""
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
        """Assert that the memory held equals the memory counted and is within the limit. For tests."""
        held = [*self._spares, *self._of_slab.values()]
        assert sum(self._charged_bytes(memory.size_bytes) for memory in held) == self._held_bytes <= self._limit_bytes

    def close(self) -> None:
        """Close all memory. A second close is a no-op."""
        for memory in (*self._spares, *self._of_slab.values()):
            memory.close()

    def _create_spares(self, sizes: list[int]) -> OSError | None:
        """Create one spare per size; on failure create none and return the system's error."""
        try:
            for size_bytes in sizes:
                self._spares.append(Memfd(size_bytes, hugepages=self.hugepages, transparent_hugepages=self._transparent_hugepages))
        except OSError as refusal:
            while self._spares:
                self._spares.pop().close()
            return refusal
        return None

    def _charged_bytes(self, size_bytes: int) -> int:
        """Return the bytes that memory of this size counts towards the limit."""
        return -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if self.hugepages else size_bytes

    def _find_spare(self, slot_bytes: int, count: int, tenant: str) -> Memfd | None:
        """Return a spare for that many slots, or else the first for fewer."""
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
        """Return a larger spare to trim, if new memory would only replace a spare: new memory is cold."""
        if self._held_bytes + self._charged_bytes(size_bytes) <= self._limit_bytes:
            return None
        larger = (memory for memory in reversed(self._spares) if memory.tenant in (None, tenant) and memory.size_bytes >= size_bytes)
        return next(larger, None)

    def _max_bytes(self, memory: Memfd) -> int:
        """Return the size that a spare can be resized to without discarding another spare."""
        return min(memory.max_size_bytes, self._charged_bytes(memory.size_bytes) + self._limit_bytes - self._held_bytes)

    def _resize(self, memory: Memfd, size_bytes: int) -> None:
        if size_bytes == memory.size_bytes:
            return
        self._held_bytes += self._charged_bytes(size_bytes) - self._charged_bytes(memory.size_bytes)
        is_trimmed = memory.file_bytes(size_bytes) < memory.file_bytes(memory.size_bytes)
        memory.resize(size_bytes)
        if is_trimmed and self.hugepages:
            memory.trim()  # at once: reserved huge pages are scarce
        elif is_trimmed:
            self._untrimmed.append(memory)
            self.has_cold.set()

    def _refill(self) -> None:
        """Create spares from the bytes that were trimmed, so that they are prefaulted before use.

        Leaves the bytes of one slab for small slabs: each would otherwise trim a spare.
        """
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
        """Create memory, discarding spares of other sizes if needed. Returns None if those are too few."""
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
            )  # it can use the huge pages just discarded
        except OSError as refusal:
            raise TierFailed(f"no shared memory of {format_size(size_bytes)}: {refusal}") from refusal
        self._held_bytes += cost
        return memory
