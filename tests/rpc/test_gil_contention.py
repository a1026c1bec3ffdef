"""Promises of gil_contention.py: calls that were late for the GIL have the next ones made with it, for a while."""

import time

from kvstore.rpc.gil_contention import FIRST_HELD, LATE_NS, MAX_HELD, GilContention, sleeps


def held(gil: GilContention) -> int:
    """How many calls are made with the GIL from now on."""
    count = 0
    while gil.holds():
        count += 1
    return count


def test_nothing_is_held_before_something_was_late() -> None:
    gil = GilContention()
    gil.copied(LATE_NS - 1)
    assert not gil.is_on
    assert held(gil) == 0


def test_a_late_copy_has_the_next_ones_made_with_the_gil() -> None:
    gil = GilContention()
    gil.copied(LATE_NS)
    assert gil.is_on
    assert held(gil) == FIRST_HELD
    assert not gil.is_on


def test_of_two_long_waits_the_second_was_for_the_gil_if_the_thread_slept_twice() -> None:
    gil = GilContention()
    gil.waited(0)
    assert gil.is_suspected
    gil.waited(sleeps())
    assert not gil.is_suspected
    assert held(gil) == 0, "the answer took that long"
    gil.waited(0)
    slept = sleeps()
    for _ in range(2):
        time.sleep(0.001)
    gil.waited(slept)
    assert held(gil) == FIRST_HELD


def test_nothing_is_held_while_another_thread_waits_for_an_answer() -> None:
    gil = GilContention()
    gil.copied(LATE_NS)
    gil.waiting.add(1)
    assert not gil.is_on
    assert held(gil) == 0
    gil.waiting.discard(1)
    assert held(gil) == FIRST_HELD


def test_each_late_probe_in_a_row_doubles_it_up_to_a_limit() -> None:
    gil = GilContention()
    counts: list[int] = []
    while not counts or counts[-1] < MAX_HELD:
        gil.copied(LATE_NS)
        counts.append(held(gil))
    assert counts == [FIRST_HELD << number for number in range(len(counts))]
    gil.copied(LATE_NS)
    assert held(gil) == MAX_HELD


def test_a_wait_that_is_too_long_to_be_held_ends_it() -> None:
    gil = GilContention()
    gil.copied(LATE_NS)
    gil.copied(LATE_NS)
    gil.missed()
    assert held(gil) == 0
    gil.copied(LATE_NS)
    assert held(gil) == FIRST_HELD


def test_sleeps_counts_those_of_this_thread() -> None:
    before = sleeps()
    time.sleep(0.001)  # a thread that sleeps gives the processor away
    assert sleeps() > before
