"""Extents are free once their value is deleted and the reads that may know them have ended; what a folder held is taken over."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.testing.transfer.awaited import PATIENCE_S, in_background, is_quiet
from kvstore.tiers.placements import ExtentAllocator, PageRun, Placement, Placements, Runs

PAGES = 300


@pytest.fixture
def placements() -> Placements:
    """Of a file of 10 pages."""
    made = Placements()
    made.grow(10)
    return made


def publish(placements: Placements, block_id: int, pages: int) -> Runs:
    runs = placements.take(pages, in_pieces=True)
    assert runs is not None
    placements.publish(block_id, Placement(block_id, runs))
    placements.check_integrity()
    return runs


def free_pages(placements: Placements) -> int:
    """Found by taking them all."""
    return next(count for count in range(placements.end_pages, -1, -1) if count == 0 or gives(placements, count))


def gives(placements: Placements, pages: int) -> bool:
    runs = placements.take(pages, in_pieces=True)
    if runs is not None:
        placements.discard(runs)
    return runs is not None


@pytest.mark.promise("slots-not-reused-early")
def test_extents_are_not_reused_while_a_read_may_know_them(placements: Placements) -> None:
    """Nor those of a later deletion while an older read goes on; a read that began later holds nothing back."""
    publish(placements, 1, 3)
    publish(placements, 2, 3)
    first = placements.begin_read()
    placements.release([1])
    second = placements.begin_read()
    placements.release([2])
    assert free_pages(placements) == 4
    placements.check_integrity()
    third = placements.begin_read()
    placements.end_read(first)
    assert free_pages(placements) == 7
    placements.end_read(second)
    assert free_pages(placements) == 10
    placements.end_read(third)


def test_an_older_read_holds_back_all_that_is_retired_after_it(placements: Placements) -> None:
    publish(placements, 1, 3)
    first, second = placements.begin_read(), placements.begin_read()
    placements.release([1])
    placements.end_read(second)
    assert free_pages(placements) == 7
    placements.end_read(first)
    assert free_pages(placements) == 10


def test_waiting_for_release_ends_with_the_read(placements: Placements) -> None:
    assert not placements.wait_for_release(PATIENCE_S), "nothing is retired"
    publish(placements, 1, 10)
    number = placements.begin_read()
    placements.release([1])
    assert not placements.wait_for_release(0.01)
    waiting = in_background(lambda: placements.wait_for_release(PATIENCE_S))
    assert is_quiet(waiting)
    placements.end_read(number)
    assert waiting.result(PATIENCE_S)


def test_restored_values_have_their_extents_and_the_rest_is_free() -> None:
    placements = Placements()
    kept = [(3, Placement(30, (PageRun(2, 4), PageRun(8, 9)))), (4, Placement(40, (PageRun(4, 5),)))]
    assert placements.restore(kept, 10) == set()
    placements.grow(10)
    placements.check_integrity()
    assert [placements.find(3), placements.find(4)] == [kept[0][1], kept[1][1]]
    assert free_pages(placements) == 6


def test_of_overlapping_values_the_newest_is_restored() -> None:
    placements = Placements()
    found = [(1, (PageRun(0, 4),)), (2, (PageRun(3, 6), PageRun(8, 10))), (3, (PageRun(5, 7),)), (4, (PageRun(7, 8),))]
    assert placements.restore([(number, Placement(0, runs)) for number, runs in found], 10) == {1, 2}
    placements.grow(10)
    placements.check_integrity()
    assert free_pages(placements) == 7


def allocator(*free: tuple[int, int]) -> ExtentAllocator:
    """An allocator of PAGES pages of which these runs are free."""
    made = ExtentAllocator()
    made.grow(PAGES)
    assert made.take(PAGES) == PageRun(0, PAGES)
    for begin, end in free:
        made.free(PageRun(begin, end))
    made.check_integrity()
    return made


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["take", "pieces", "free", "grow"]), st.integers(1, 40)), max_size=80))
def test_extents_in_any_order_match_a_set_of_pages(steps: list[tuple[str, int]]) -> None:
    made, free, taken = ExtentAllocator(), set[int](), list[list[PageRun]]()
    for act, number in steps:
        if act == "grow":
            free |= set(range(made.end_pages, made.end_pages + number))
            made.grow(made.end_pages + number)
        elif act == "free" and taken:
            for run in taken.pop(number % len(taken)):
                free |= set(range(*run))
                made.free(run)
        elif act == "take" and (found := made.take(number)) is not None:
            taken.append([found])
            free = without(free, taken[-1], number)
        elif act == "pieces" and number <= len(free):
            taken.append(made.take_pieces(number))
            free = without(free, taken[-1], number)
        made.check_integrity()
        assert {page for run in made.free_runs() for page in range(*run)} == free


def without(free: set[int], runs: list[PageRun], pages: int) -> set[int]:
    got = [page for run in runs for page in range(*run)]
    assert len(got) == pages == len(set(got))
    assert free.issuperset(got)
    return free.difference(got)
