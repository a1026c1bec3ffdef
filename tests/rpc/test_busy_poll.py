"""Promises of busy_poll.py: only who was answered soon looks again, and the less the more often that was in vain."""

from kvstore.rpc.busy_poll import MAX_RESTS, WORTH_FACTOR, BusyPoll

SHORT_NS = 150_000
LONG_NS = 5_000_000


def short_waits_until_on(busy: BusyPoll) -> int:
    count = 0
    while not busy.is_on:
        busy.slept(SHORT_NS)
        count += 1
    return count


def test_it_begins_after_a_short_wait_and_goes_on_while_it_finds() -> None:
    busy = BusyPoll(100, processors=2)
    assert not busy.is_on
    busy.slept(LONG_NS)
    busy.slept(WORTH_FACTOR * busy.max_ns)
    assert not busy.is_on
    busy.slept(SHORT_NS)
    assert busy.is_on
    for _ in range(1000):
        busy.found()
    assert busy.is_on


def test_vain_polls_double_the_waits_before_the_next_up_to_max() -> None:
    busy = BusyPoll(100, processors=2)
    rests = []
    for _ in range(12):
        rests.append(short_waits_until_on(busy))
        busy.missed()
        assert not busy.is_on
    assert rests == [1, 1, 2, 4, 8, 16, 32, 64, 128, MAX_RESTS, MAX_RESTS, MAX_RESTS]
    short_waits_until_on(busy)
    busy.found()
    busy.missed()
    assert short_waits_until_on(busy) == 1, "what was found makes up for it"


def test_who_may_not_or_has_one_processor_never_looks() -> None:
    for busy in (BusyPoll(0, processors=8), BusyPoll(100, processors=1)):
        assert not busy.max_ns
        busy.slept(0)
        assert not busy.is_on
