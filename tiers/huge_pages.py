"""Transparent huge pages for shared memory: mapping with MADV_HUGEPAGE, and what this host's kernel allows.

Reserved huge pages (hugetlb, `Memfd(hugepages=True)`) are separate. A request that the kernel refuses costs nothing:
the memory is then in 4 KiB pages.
"""

import ctypes
import mmap
import re
from pathlib import Path
from typing import Final

HUGE_PAGE_BYTES: Final = 2 << 20
"""Default huge page size on x86-64 and (with 4 KiB base pages) arm64, and the alignment of a mapping that uses them."""

SHMEM_ENABLED: Final = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
"""Kernel policy for shared memory; the active value is in brackets."""
ENABLING_POLICIES: Final = ("advise", "within_size", "always", "force")
"""Policies under which memory with MADV_HUGEPAGE gets huge pages."""

MAP_FIXED: Final = 0x10
"""linux/mman.h: map at this address, replacing what is mapped there."""
MAP_NORESERVE: Final = 0x4000
"""linux/mman.h: reserve addresses only, no memory."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_with_huge_pages(fd: int, size_bytes: int) -> memoryview:
    """Map the shared memory of `fd` read-write, aligned to huge pages, with MADV_HUGEPAGE.

    An anonymous mapping owns the address range, and the memory is mapped over it. The bytes behind the last whole huge
    page are in small pages. The mapping lives as long as its views. Raises OSError.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    owner = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=flags)
    begin = -ctypes.addressof(ctypes.c_ubyte.from_buffer(owner)) % HUGE_PAGE_BYTES
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(owner, begin))
    if _libc.mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, 0) != address:
        raise OSError(ctypes.get_errno(), "the system refuses another mapping")
    _libc.madvise(address, size_bytes, mmap.MADV_HUGEPAGE)  # best effort: without it the pages are small
    return memoryview(owner)[begin : begin + size_bytes]


def policy(root: Path = Path("/")) -> str:
    """Return the active value of SHMEM_ENABLED, or "" if the kernel has no such policy. `root` is the file system's
    root.
    """
    try:
        found = re.search(r"\[(\w+)\]", (root / SHMEM_ENABLED).read_text())
    except OSError:
        return ""
    return found[1] if found is not None else ""


def unavailable_reason(root: Path = Path("/")) -> str:
    """Return why MADV_HUGEPAGE has no effect on shared memory here, or "" if it has."""
    word = policy(root)
    if word in ENABLING_POLICIES:
        return ""
    return f"shmem_enabled is {word}" if word else "the kernel does not support them for shared memory"


def shared_huge_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of shared memory that this process maps in huge pages.

    Walks the page tables: 5 ms per GiB of small pages and more on a busy machine. Do not call it on an event loop.
    """
    try:
        found = re.search(r"^ShmemPmdMapped:\s+(\d+) kB$", (root / "proc/self/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:  # kernels before 4.14 have no such file
        return 0
    return int(found[1]) << 10 if found is not None else 0
