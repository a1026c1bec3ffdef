"""Extents are free once their value is deleted and the reads that may know them have ended; what a folder held is taken over."""

import pytest

from kvstore.protocol.errors import Closed
from kvstore.tiers.placements import Placement, Placements, Run, Runs, pack_runs, pages_of, unpack_runs
from kvstore.transfer.testing.waiting import PATIENCE_S, in_background, is_quiet


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


def test_a_published_value_is_found_until_it_is_released(placements: Placements) -> None:
    runs = publish(placements, 1, 4)
    assert placements.find(1) == Placement(1, runs)
    assert free_pages(placements) == 6
    placements.release([1, 2])
    assert placements.find(1) is None
    assert free_pages(placements) == 10


def test_a_value_in_several_runs_is_found(placements: Placements) -> None:
    for block_id in range(5):
        publish(placements, block_id, 2)
    placements.release([0, 2])
    assert placements.take(4, in_pieces=False) is None
    runs = publish(placements, 7, 4)
    assert sorted(runs) == [Run(0, 2), Run(4, 6)]
    assert placements.find(7) == Placement(7, runs)
    placements.check_integrity()


def test_extents_of_an_overwritten_value_are_retired(placements: Placements) -> None:
    publish(placements, 1, 4)
    runs = publish(placements, 1, 4)
    assert placements.find(1) == Placement(1, runs)
    assert free_pages(placements) == 6


def test_discarded_extents_are_free(placements: Placements) -> None:
    runs = placements.take(10, in_pieces=False)
    assert runs is not None
    assert placements.take(1, in_pieces=True) is None
    placements.discard(runs)
    assert free_pages(placements) == 10


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


def test_closing_waits_for_reads_and_lets_none_begin(placements: Placements) -> None:
    number = placements.begin_read()
    assert not placements.close(0.01)
    with pytest.raises(Closed):
        placements.begin_read()
    placements.end_read(number)
    assert placements.close(0.01)


def test_restored_values_have_their_extents_and_the_rest_is_free() -> None:
    placements = Placements()
    kept = [(3, Placement(30, (Run(2, 4), Run(8, 9)))), (4, Placement(40, (Run(4, 5),)))]
    assert placements.restore(kept, 10) == set()
    placements.grow(10)
    placements.check_integrity()
    assert [placements.find(3), placements.find(4)] == [kept[0][1], kept[1][1]]
    assert free_pages(placements) == 6


def test_of_overlapping_values_the_newest_is_restored() -> None:
    placements = Placements()
    found = [(1, (Run(0, 4),)), (2, (Run(3, 6), Run(8, 10))), (3, (Run(5, 7),)), (4, (Run(7, 8),))]
    assert placements.restore([(number, Placement(0, runs)) for number, runs in found], 10) == {1, 2}
    placements.grow(10)
    placements.check_integrity()
    assert free_pages(placements) == 7


def test_a_value_under_a_long_run_of_an_older_one_is_restored() -> None:
    placements = Placements()
    found = [(1, (Run(0, 9),)), (2, (Run(2, 3),)), (3, (Run(5, 6),))]
    assert placements.restore([(number, Placement(0, runs)) for number, runs in found], 10) == {1}


def test_a_value_behind_the_end_of_the_file_is_lost() -> None:
    placements = Placements()
    assert placements.restore([(1, Placement(0, (Run(9, 11),))), (2, Placement(0, (Run(9, 10),)))], 10) == {1}


def test_an_empty_table_is_sound() -> None:
    Placements().check_integrity()


def test_runs_are_unpacked_as_they_were_packed() -> None:
    runs = (Run(1 << 40, (1 << 40) + 5), Run(0, 1))
    assert unpack_runs(pack_runs(runs)) == runs


def test_pages_of_a_value_are_rounded_up() -> None:
    assert [pages_of(size) for size in (1, 4096, 4097)] == [1, 1, 2]
