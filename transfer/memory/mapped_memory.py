"""Mapping of shared memory: regions of this process, and slabs of other processes.

A copy into or out of a present page costs a memcpy, the first touch of a page ten times that. Mappings are therefore
populated at once.
"""

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.protocol.errors import Broken, Full, InvalidArgument
from kvstore.protocol.settings import format_size
from kvstore.transfer.memory.region import Region

MADV_POPULATE_READ: Final = 22
"""Suffices for writes too: shared memory has no write notification, so a page mapped for reading accepts writes without
a fault. Reading faults 16 pages at once: 64 MiB take 3.7 ms, with MADV_POPULATE_WRITE 11.6 ms.
"""

MAP_FIXED: Final = 0x10
"""linux/mman.h: map at this address, replacing what is mapped there."""

MAP_NORESERVE: Final = 0x4000
"""linux/mman.h: reserve addresses only, no memory."""
HUGE_PAGE_BYTES: Final = 2 << 20
"""Alignment of a mapping with huge pages, reserved or transparent."""

MAX_REGION_BYTES: Final = 1 << 46

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class MappedSlab:
    """A mapped slab. Views of `memory` keep the mapping alive."""

    memory: memoryview

    def part(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a view of the range. Raises Broken if the slab is shorter."""
        if offset_bytes + size_bytes > len(self.memory):
            raise Broken(f"a node named bytes {offset_bytes} to {offset_bytes + size_bytes} of a slab of {len(self.memory)} bytes")
        return self.memory[offset_bytes : offset_bytes + size_bytes]


def map_slab(fd: int, size_bytes: int, *, writable: bool, transparent_hugepages: bool = False, populated: bool = True) -> MappedSlab:
    """Map the shared memory of `fd` and close `fd`.

    Args:
      transparent_hugepages: request huge pages for pages that this mapping allocates.
      populated: fault in all pages. Otherwise pages are allocated on first use.

    Raises Broken, also if there is less memory than `size_bytes`: a touch behind its end would kill this process.

    mmap.mmap would keep a descriptor per slab, and a large tier has thousands. An anonymous mmap therefore owns the
    address range, and the memory is mapped over it. An exception of a signal handler at any point leaves no unowned
    mapping.
    """
    try:
        if not 0 < size_bytes <= os.fstat(fd).st_size:
            raise Broken(f"cannot map a slab of {size_bytes} bytes: its memory has {os.fstat(fd).st_size}")
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            owner = mmap.mmap(-1, -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + HUGE_PAGE_BYTES, flags=flags)
        except OSError as error:
            raise Broken(f"cannot map a slab of {format_size(size_bytes)}: {error.strerror}") from None
        begin = -ctypes.addressof(ctypes.c_ubyte.from_buffer(owner)) % HUGE_PAGE_BYTES
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(owner, begin))
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if _libc.mmap(address, size_bytes, protection, mmap.MAP_SHARED | MAP_FIXED, fd, 0) == _MAP_FAILED:
            raise Broken(f"cannot map a slab of {format_size(size_bytes)}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)
    if transparent_hugepages:  # the mapping that first touches a page decides its size
        _libc.madvise(address, size_bytes, mmap.MADV_HUGEPAGE)
    if populated:  # kernels before 5.14 refuse: pages are then allocated on first use
        _libc.madvise(address, size_bytes, MADV_POPULATE_READ)
    view = memoryview(owner)[begin : begin + size_bytes]
    return MappedSlab(view if writable else view.toreadonly())


def free_pages(memory: memoryview) -> None:
    """Free the whole pages of a range of shared memory, for all processes that map them: they read as zeros. Best
    effort.
    """
    begin = np.frombuffer(memory, np.uint8).ctypes.data
    first, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, (begin + len(memory)) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        _libc.madvise(first, end - first, mmap.MADV_REMOVE)


def allocate(size_bytes: int) -> Region:
    """Return a region of zeroed shared memory (a sealed memfd). `close` closes the descriptor; the memory lives as long
    as its views.

    Raises InvalidArgument (size out of range) or Full (the system has no memory or descriptor left).
    """
    if not 1 <= size_bytes <= MAX_REGION_BYTES:
        raise InvalidArgument(f"a region is 1 byte to {format_size(MAX_REGION_BYTES)} long, not {size_bytes:,} bytes")
    if size_bytes > (memory_bytes := os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE):  # populating it would get this process killed
        raise Full(f"no shared memory of {format_size(size_bytes)}: this machine has {format_size(memory_bytes)}")
    try:
        fd = os.memfd_create("kvstore-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise Full(f"no descriptor is left for a region: {error.strerror}") from None
    try:
        os.ftruncate(fd, size_bytes)
        # Shrinking would kill peers that map it (SIGBUS).
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        slab = map_slab(os.dup(fd), size_bytes, writable=True)
    except (OSError, Broken) as error:
        os.close(fd)
        raise Full(f"no shared memory of {format_size(size_bytes)}: {error}") from None
    region = Region(slab.memory, fd=fd)
    region.on_close(lambda closed: os.close(closed.fd))
    return region
