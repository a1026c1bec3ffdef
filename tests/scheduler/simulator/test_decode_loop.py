"""Promises of decode_loop.py. A step takes 1/16 s and 1/64 s more a sequence."""

import pytest

from kvstore.scheduler.simulator.decode import DecodeLoop, Gaps
from kvstore.scheduler.simulator.job import EventQueue, Job
from tests.scheduler.simulator.parts import job, machine


class Owner:
    """Goes on as long as there is anything to decode, and notes who ended when."""

    def __init__(self, *jobs: Job) -> None:
        self.events = EventQueue()
        self.gaps = Gaps()
        self.loop = DecodeLoop(machine(), self.events, self.gaps, self.stopped)
        self.ended: list[tuple[int, float]] = []
        self.joining: list[Job] = []
        for each in jobs:
            self.loop.join(each)

    def stopped(self, ended: list[Job]) -> None:
        self.ended += [(each.number, self.events.now_s) for each in ended]
        for each in self.joining:
            self.loop.join(each)
        self.joining.clear()
        if len(self.loop.batch):
            self.loop.run()


def test_a_sequence_alone_takes_a_step_for_each_token_after_its_first() -> None:
    owner = Owner(job(tokens=100, output=9))
    owner.loop.run()
    owner.events.run()
    step_s = 1 / 16 + 1 / 64
    assert owner.ended == [(0, 8 * step_s)]
    assert owner.loop.busy_s == 8 * step_s
    assert owner.loop.tokens == 8
    # Its own token and 101, 102, ... of context: 10 and the context for each step.
    assert owner.loop.flops == sum(10 + 101 + step for step in range(8)) - 4
    assert owner.gaps.points() == [(step_s, 1.0)]
    assert not owner.loop.is_running


def test_who_comes_during_a_step_joins_after_it() -> None:
    owner = Owner(job(0, tokens=100, output=5))
    late = job(1, tokens=50, output=3)
    late.first_token_s = 0.1
    owner.loop.run()

    def come() -> None:
        assert owner.loop.context_tokens() == 102, "one step is over and the second runs"
        owner.joining.append(late)
        owner.loop.cut()
        owner.loop.cut()

    owner.events.at(0.1, come)
    owner.events.run()
    alone_s, both_s = 5 / 64, 6 / 64
    assert owner.ended == [(0, 2 * alone_s + 2 * both_s), (1, 2 * alone_s + 2 * both_s)]
    # The newcomer's first gap runs from its first token, at 0.1.
    assert owner.gaps.points() == [(alone_s, 2 / 6), (both_s, 5 / 6), (pytest.approx(2 * alone_s + both_s - 0.1), 1.0)]


def test_a_stall_is_a_gap_of_those_who_waited() -> None:
    owner = Owner(job(tokens=100, output=3))
    owner.stopped = lambda ended: None  # type: ignore[method-assign]
    owner.loop = DecodeLoop(machine(), owner.events, owner.gaps, lambda ended: None)
    owner.loop.join(job(tokens=100, output=4))
    owner.loop.run_step(1.0, decode_share_s=0.25)
    owner.events.at(5.0, owner.loop.run)
    owner.events.run()
    assert owner.gaps.points() == [(5 / 64, 1 / 3), (1.0, 2 / 3), (4 + 5 / 64, 1.0)]
    assert owner.loop.busy_s == 0.25 + 2 * 5 / 64
