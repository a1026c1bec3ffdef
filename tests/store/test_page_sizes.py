"""What a node finds out of the pages of its DRAM, on hosts made up from files and on this one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.store.prefault import LOOK_S, PageSizes
from kvstore.tiers import memfd
from kvstore.tiers.dram import DramTier
from kvstore.tiers.huge_pages import HUGE_PAGE_BYTES, SHMEM_ENABLED, why_none

CAPACITY = 4 * HUGE_PAGE_BYTES


@pytest.fixture
def dram() -> Iterator[DramTier]:
    tier = DramTier(CAPACITY, slab_bytes=CAPACITY)
    yield tier
    tier.close()


def host(root: Path, *, word: str, mapped_kib: int) -> Path:
    for path, text in ((root / SHMEM_ENABLED, f"[{word}]"), (root / "proc/self/smaps_rollup", f"ShmemPmdMapped: {mapped_kib:>8} kB\n")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_before_the_first_look_it_says_why_there_may_be_none(dram: DramTier, tmp_path: Path) -> None:
    pages = PageSizes(dram, root=host(tmp_path, word="deny", mapped_kib=0))
    assert (pages.huge_bytes, pages.why_not) == (0, "shmem_enabled is deny")


def test_what_the_host_gives_is_counted_and_no_more_than_dram_has(dram: DramTier, tmp_path: Path) -> None:
    pages = PageSizes(dram, root=host(tmp_path, word="advise", mapped_kib=4096))
    assert pages.look() >= LOOK_S
    assert (pages.huge_bytes, pages.why_not) == (4 << 20, "")
    host(tmp_path, word="within_size", mapped_kib=1 << 20)
    pages.look()
    assert (pages.huge_bytes, pages.why_not) == (CAPACITY, "")


def test_where_the_host_gives_none_it_says_why_and_what_was_had_before_stays(dram: DramTier, tmp_path: Path) -> None:
    pages = PageSizes(dram, root=host(tmp_path, word="never", mapped_kib=2048))
    pages.look()
    assert (pages.huge_bytes, pages.why_not) == (0, "shmem_enabled is never")
    host(tmp_path, word="advise", mapped_kib=2048)
    pages.look()
    host(tmp_path, word="never", mapped_kib=2048)
    pages.look()
    assert (pages.huge_bytes, pages.why_not) == (2 << 20, "shmem_enabled is never")


def test_reserved_huge_pages_hold_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "MFD_HUGETLB", 0)  # few machines have any set aside: ordinary pages stand in for them
    dram = DramTier(CAPACITY, slab_bytes=CAPACITY, hugepages=True)
    pages = PageSizes(dram)
    pages.look()
    assert (pages.huge_bytes, pages.why_not) == (CAPACITY, "")
    dram.close()


def test_what_this_host_gives_is_what_its_files_say(dram: DramTier) -> None:
    dram.prefault_step(CAPACITY)
    pages = PageSizes(dram)
    pages.look()
    assert pages.why_not == why_none()
    assert pages.huge_bytes % HUGE_PAGE_BYTES == 0
    assert pages.huge_bytes == 0 or not pages.why_not
