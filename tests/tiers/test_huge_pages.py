"""Huge page policy files of several kernels, and mappings with huge pages."""

import errno
import mmap
import os
import resource
from pathlib import Path

import pytest

from kvstore.tiers.huge_pages import HUGE_PAGE_BYTES, SHMEM_ENABLED, map_with_huge_pages, policy, shared_huge_bytes, unavailable_reason

PMD_MAPPED = """559d5e400000-7fff9e1c1000 ---p 00000000 00:00 0                          [rollup]
Rss:              309892 kB
AnonHugePages:      4096 kB
ShmemPmdMapped:   262144 kB
FilePmdMapped:         0 kB
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("text", "word", "reason"),
    [
        ("always within_size advise [never] deny force", "never", "shmem_enabled is never"),
        ("always within_size advise never [deny] force", "deny", "shmem_enabled is deny"),
        ("always within_size [advise] never deny force", "advise", ""),
        ("always [within_size] advise never deny force", "within_size", ""),
        ("[always] within_size advise never deny force", "always", ""),
        ("what a later kernel writes", "", "the kernel does not support them for shared memory"),
    ],
)
def test_unavailable_reason_follows_the_active_policy(tmp_path: Path, text: str, word: str, reason: str) -> None:
    write(tmp_path / SHMEM_ENABLED, f"{text}\n")
    assert (policy(tmp_path), unavailable_reason(tmp_path)) == (word, reason)


def test_what_this_process_has_of_them_is_counted(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/smaps_rollup", PMD_MAPPED)
    assert shared_huge_bytes(tmp_path) == 256 << 20
    write(tmp_path / "proc/self/smaps_rollup", "Rss: 1 kB\n")
    assert shared_huge_bytes(tmp_path) == 0


def test_a_refused_mapping_leaks_nothing() -> None:
    fd, pipe = os.memfd_create("asking"), os.pipe()
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    with pytest.raises(OSError, match="refuses another mapping") as refused:
        map_with_huge_pages(pipe[1], HUGE_PAGE_BYTES)
    assert refused.value.errno in (errno.EACCES, errno.ENODEV)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (64 << 20), hard))
    try:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            map_with_huge_pages(fd, 256 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    for number in (fd, *pipe):
        os.close(number)
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= maps + 1
