"""Promises of decode.py. A step takes 1/16 s and 1/64 s more a sequence."""

from kvstore.scheduler.simulator.decode import DecodeServer, Gaps
from kvstore.scheduler.simulator.job import EventQueue, Job
from tests.scheduler.simulator.parts import job, machine


class Served:
    """A server and whom it served."""

    def __init__(self, capacity_tokens: int = 1_000_000) -> None:
        self.events = EventQueue()
        self.ended: list[tuple[int, float]] = []
        self.server = DecodeServer(machine(capacity_tokens=capacity_tokens), self.events, Gaps(), self._end)

    def _end(self, found: Job) -> None:
        self.ended.append((found.number, self.events.now_s))

    def give_at(self, at_s: float, found: Job) -> None:
        self.server.promise(found)
        self.events.at(at_s, lambda: self.server.give(found))


def test_who_comes_joins_those_who_are_there() -> None:
    served = Served()
    served.give_at(0.0, job(0, tokens=100, output=5))
    served.give_at(0.1, job(1, tokens=100, output=3))
    served.events.run()
    # Two steps alone, of 5/64 s; the second arrives during the second of them.
    assert served.ended == [(0, 22 / 64), (1, 22 / 64)]
    assert (served.server.used_tokens, served.server.sequences, served.server.context_tokens()) == (0, 0, 0)


def test_what_is_promised_counts_before_it_comes() -> None:
    served = Served()
    kept, broken = job(0, tokens=100, output=5), job(1, tokens=70, output=5)
    served.server.promise(kept)
    served.server.promise(broken)
    assert (served.server.sequences, served.server.context_tokens()) == (2, 170)
    served.server.break_off(broken)
    served.server.give(kept)
    assert (served.server.sequences, served.server.context_tokens(), served.server.used_tokens) == (1, 101, 105)


def test_what_does_not_fit_waits_and_nobody_passes_it() -> None:
    served = Served(capacity_tokens=250)
    for number, tokens in enumerate((195, 95, 5)):
        served.give_at(0.0, job(number, tokens=tokens, output=5))
    served.events.at(0.001, lambda: served.ended.append((-served.server.waiting, served.server.context_tokens())))
    served.events.run()
    assert served.ended == [(-2, 296), (0, 20 / 64), (1, 44 / 64), (2, 44 / 64)]
