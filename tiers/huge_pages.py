"""Huge pages that the kernel gives to shared memory by itself: how a slab asks for them, whether this host gives any, and how many it gave.

Not those that an operator reserves (`Memfd(hugepages=True)`, hugetlb), which are taken whole or not at all. What is asked for here costs
nothing where it is refused: the memory then is in pages of 4 KiB.
"""

import ctypes
import mmap
import re
from pathlib import Path
from typing import Final

HUGE_PAGE_BYTES: Final = 2 << 20
"""The default size of huge pages on x86-64 and (with 4 KiB base pages) arm64. A mapping of some begins at a multiple of it."""

SHMEM_ENABLED: Final = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
"""When shared memory gets huge pages; the word in brackets is in force."""
ENABLING_POLICIES: Final = ("advise", "within_size", "always", "force")
"""Of its words those with which memory that asks gets some."""

MAP_FIXED: Final = 0x10
"""linux/mman.h: at this very address, in place of what is mapped there."""
MAP_NORESERVE: Final = 0x4000
"""linux/mman.h: addresses alone, no memory is set aside for them."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_with_huge_pages(fd: int, size_bytes: int) -> memoryview:
    """Map the shared memory of `fd`, read-write, and ask for huge pages: from a multiple of their size on, or the kernel gives none. What
    is left behind the last whole one is in small pages. The memory is mapped for as long as there are views of it. Raises OSError.

    An anonymous mapping owns the addresses, and the memory is mapped over that.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    owner = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=flags)
    begin = -ctypes.addressof(ctypes.c_ubyte.from_buffer(owner)) % HUGE_PAGE_BYTES
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(owner, begin))
    if _libc.mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, 0) != address:
        raise OSError(ctypes.get_errno(), "the system maps no more memory")
    _libc.madvise(address, size_bytes, mmap.MADV_HUGEPAGE)  # a kernel without huge pages refuses, and has small ones
    return memoryview(owner)[begin : begin + size_bytes]


def policy(root: Path = Path("/")) -> str:
    """The word of SHMEM_ENABLED that is in force; "" where the kernel has no huge pages for shared memory. `root` is that of the files."""
    try:
        found = re.search(r"\[(\w+)\]", (root / SHMEM_ENABLED).read_text())
    except OSError:
        return ""
    return found[1] if found is not None else ""


def unavailable_reason(root: Path = Path("/")) -> str:
    """Why memory that asks for huge pages gets none here; "": it gets some."""
    word = policy(root)
    if word in ENABLING_POLICIES:
        return ""
    return f"shmem_enabled is {word}" if word else "the kernel has none for shared memory"


def shared_huge_bytes(root: Path = Path("/")) -> int:
    """How much shared memory this process has mapped in huge pages. It walks the process's page tables: 5 ms a GiB of small pages and more
    on a busy machine, so not for a reactor."""
    try:
        found = re.search(r"^ShmemPmdMapped:\s+(\d+) kB$", (root / "proc/self/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:  # kernels before 4.14 have no such file
        return 0
    return int(found[1]) << 10 if found is not None else 0
