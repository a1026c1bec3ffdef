"""Memory that other processes can map: one memfd (Memfd), and the pool that backs the slabs of the DRAM tier with them (MemfdPool).

Neither knows slots. The first write of a memfd page is some ten times slower than later ones (0.4-0.7 against 9 GB/s measured),
so the pool makes its memory at the start and faults it in step by step, in a thread of the caller's.
"""

import ctypes
import fcntl
import mmap
import os
import resource
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import ConfigError, TierFailed
from kvstore.tiers.huge_pages import HUGE_PAGE_BYTES, map_asking

Bytes = npt.NDArray[np.uint8]

PAGE_BYTES = mmap.PAGESIZE

MFD_HUGETLB = 0x4
"""linux/memfd.h; the os module has it only from Python 3.13 on some builds."""

MADV_POPULATE_WRITE = 23
"""linux/mman.h, Linux 5.14: fault pages in for writing without changing a byte."""

MADV_REMOVE = 9
"""linux/mman.h: free these pages of shared memory, whoever maps them."""

PREFAULT_CHUNK_BYTES = 8 << 20
"""How much is faulted in under one lock: a slab being assigned waits for it at most some 20 ms."""

MAX_MEMFDS = 8192
"""Memfds of one pool: each is two descriptors (Python's mmap keeps one of its own) and a mapping, or one descriptor and three mappings
(huge_pages.map_asking), of which the system allows so many (RLIMIT_NOFILE; 65,530 mappings). It is twice what slabs of 1/4096 of a tier
come to; beyond it there is no memory for a further slab before another is given up."""

MAX_TRIM = 2
"""Memory is cut down to at least 1/2 for a smaller slab: a smaller part is made anew."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Memfd:
    """`size_bytes` of shared memory, mapped read-write in this process as `bytes` (uint8, one dimension).

    `prefault` may be called from another thread than the rest. Views taken of `bytes` keep the mapping alive after `close`.
    """

    def __init__(self, size_bytes: int, *, hugepages: bool = False, asks: bool = True) -> None:
        """With `hugepages` it is in those that are reserved; with `asks` it asks for those that the kernel gives by itself.

        Raises OSError: no descriptor, memory or (with `hugepages`) huge page is left.
        """
        self.page_bytes = HUGE_PAGE_BYTES if hugepages else PAGE_BYTES
        self.exported = False
        self.tenant: str | None = None
        """Whose bytes are or were in it; None while it is as the kernel made it."""
        self._lock = threading.Lock()
        self.fd = os.memfd_create("kvstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (MFD_HUGETLB if hugepages else 0))
        try:
            # Another user's process that was given a read-only descriptor must not open the file again for writing.
            os.fchmod(self.fd, 0o400)
            os.ftruncate(self.fd, self.file_bytes(size_bytes))
            mapped = self._map(self.file_bytes(size_bytes), asks=asks and not hugepages)
        except OSError:
            os.close(self.fd)
            raise
        self.bytes: Bytes = np.frombuffer(mapped, np.uint8, size_bytes)

    def _map(self, size_bytes: int, *, asks: bool) -> mmap.mmap | memoryview:
        """Memory that holds no whole huge page does not ask: mapped plainly it costs one mapping, not three."""
        if asks and size_bytes >= HUGE_PAGE_BYTES:
            return map_asking(self.fd, size_bytes)
        return mmap.mmap(self.fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)

    @property
    def size_bytes(self) -> int:
        return len(self.bytes)

    def file_bytes(self, size_bytes: int) -> int:
        """The size of a file that holds `size_bytes`: whole pages."""
        return -(-size_bytes // self.page_bytes) * self.page_bytes

    def trim(self, size_bytes: int) -> None:
        """Give all but the first `size_bytes` back to the system. Not once exported: a mapping's reader would die of SIGBUS."""
        with self._lock:
            if self.file_bytes(size_bytes) < self.file_bytes(self.size_bytes):
                os.ftruncate(self.fd, self.file_bytes(size_bytes))
            self.bytes = self.bytes[:size_bytes]

    def export(self, *, writable: bool) -> int:
        """A new descriptor, owned by the caller, to pass to another process. Fixes the size for good."""
        self.fix_size()
        if writable:
            return os.dup(self.fd)
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def fix_size(self) -> None:
        """It is being shared: it must not shrink under whoever uses it."""
        if not self.exported:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self.exported = True

    def prefault(self, begin_bytes: int, end_bytes: int) -> None:
        """Fault in the pages of [begin_bytes, end_bytes), as far as they still exist. Changes no byte; best effort."""
        with self._lock:
            target = self.bytes[begin_bytes - begin_bytes % self.page_bytes : end_bytes]
            if target.size and _libc.madvise(target.ctypes.data, target.size, MADV_POPULATE_WRITE):
                # Older kernels: reading a page of shared memory makes the kernel find and zero it, which is most of the cost.
                target[:: self.page_bytes].max()

    def discard(self) -> None:
        """Close it and give its pages back to the system, though others may still map it: they find zeros. Nobody may be using it."""
        with self._lock:
            _libc.madvise(self.bytes.ctypes.data, self.file_bytes(self.size_bytes), MADV_REMOVE)
        self.close()

    def close(self) -> None:
        """Forget the memory. The descriptor is closed, the mapping goes with its last view. A second close is a no-op."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
                self.bytes = np.empty(0, np.uint8)


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
        asks: bool = True,
    ) -> None:
        """Falls back to normal pages, all of them, where reserved huge ones do not suffice; `asks` as Memfd. Raises ConfigError when the
        system refuses."""
        self.hugepages = hugepages
        self._asks = asks
        self._max_memfds = min(MAX_MEMFDS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._capacity_bytes = capacity_bytes
        self._of_slab: dict[int, Memfd] = {}
        small = first_sizes if sum(first_sizes) <= capacity_bytes and not hugepages else ()
        whole, rest = divmod(capacity_bytes - sum(small), slab_bytes)
        sizes = [*small, *[slab_bytes] * whole, *[rest] * bool(rest)]
        self._spares: deque[Memfd] = deque()
        if hugepages:
            self.hugepages = self._fill(sizes) is None
        refusal = None if self.hugepages else self._fill(sizes)
        if refusal is not None:
            raise ConfigError(f"cannot make {len(sizes)} slabs of shared memory: {refusal}") from refusal
        self._held_bytes = self._limit_bytes = sum(map(self._cost, sizes))
        """In whole huge pages, where these are reserved: no more of them are set aside, and what is beyond is nobody's."""
        self.slabs_gone = 0
        """Slabs given up since the pool was made."""
        # (memory, begin, end): what is still to be faulted in. Only `prefault_step`, in its thread, changes it after this.
        self._cold = deque((memory, 0, memory.size_bytes) for memory in self._spares)
        self._cold_bytes = capacity_bytes

    @property
    def prefaulted_bytes(self) -> int:
        return self._capacity_bytes - self._cold_bytes

    def memory(self, slab: int) -> Memfd:
        return self._of_slab[slab]

    def acquire(self, slab: int, slot_bytes: int, count: int, tenant: str) -> int:
        """See Backing. The whole `count`, or 0 where there are as many memfds as may be, or, of reserved huge pages, none is left: a slab
        takes whole ones. Raises TierFailed when the system has no descriptor or mapping left."""
        size_bytes = count * slot_bytes
        memory = next((spare for spare in self._spares if _suits(spare, size_bytes, tenant)), None)
        if memory is not None:
            self._spares.remove(memory)
            self._held_bytes += self._cost(size_bytes) - self._cost(memory.size_bytes)
            memory.trim(size_bytes)
        else:
            memory = self._make(size_bytes)
        if memory is None:
            return 0
        memory.tenant = tenant
        self._of_slab[slab] = memory
        return count

    def release(self, slab: int) -> None:
        self.slabs_gone += 1
        # In front: its pages are warm, so it is the one to take next.
        self._spares.appendleft(self._of_slab.pop(slab))

    def prefault_step(self, max_bytes: int) -> int:
        """Fault in up to `max_bytes` more; returns how many bytes are left. One thread at a time, any thread; releases the GIL."""
        budget_bytes = max_bytes
        while self._cold and budget_bytes > 0:
            memory, begin, end = self._cold.popleft()
            step_bytes = min(end - begin, PREFAULT_CHUNK_BYTES, budget_bytes)
            memory.prefault(begin, begin + step_bytes)
            if begin + step_bytes < end:
                self._cold.appendleft((memory, begin + step_bytes, end))
            budget_bytes -= step_bytes
            self._cold_bytes -= step_bytes
        return self._cold_bytes

    def check_integrity(self) -> None:
        """Assert that memory held is memory counted, and no more than the capacity. For tests."""
        held = [*self._spares, *self._of_slab.values()]
        assert sum(self._cost(memory.size_bytes) for memory in held) == self._held_bytes <= self._limit_bytes

    def close(self) -> None:
        """Close all memory. A second close is a no-op."""
        for memory in (*self._spares, *self._of_slab.values()):
            memory.close()

    def _fill(self, sizes: list[int]) -> OSError | None:
        """One spare for each size, or none at all and the system's refusal."""
        try:
            for size_bytes in sizes:
                self._spares.append(Memfd(size_bytes, hugepages=self.hugepages, asks=self._asks))
        except OSError as refusal:
            while self._spares:
                self._spares.pop().close()
            return refusal
        return None

    def _cost(self, size_bytes: int) -> int:
        """What memory of that size takes of the limit."""
        return -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if self.hugepages else size_bytes

    def _make(self, size_bytes: int) -> Memfd | None:
        """New memory, in the place of spares that suit nobody. None: of those there are too few."""
        cost = self._cost(size_bytes)
        # The spares at the back were released longest ago or are not faulted in yet.
        while self._held_bytes + cost > self._limit_bytes or len(self._of_slab) + len(self._spares) >= self._max_memfds:
            if not self._spares:
                return None
            dropped = self._spares.pop()
            self._held_bytes -= self._cost(dropped.size_bytes)
            dropped.discard()
        try:
            memory = Memfd(size_bytes, hugepages=self.hugepages, asks=self._asks)  # the huge pages just discarded are free for it
        except OSError as refusal:
            raise TierFailed(f"no shared memory of {size_bytes} bytes: {refusal}") from refusal
        self._held_bytes += cost
        return memory


def _suits(spare: Memfd, size_bytes: int, tenant: str) -> bool:
    """Whether a slab of `size_bytes` may live there: no other tenant's bytes, and not smaller, nor larger with its size fixed, nor so large
    that most of it would be trimmed off, for what is trimmed off is faulted in no more."""
    if spare.tenant not in (None, tenant):
        return False
    return spare.size_bytes == size_bytes if spare.exported else size_bytes <= spare.size_bytes <= MAX_TRIM * size_bytes
