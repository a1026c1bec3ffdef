"""Promises of coupled.py, by the plainest order there is: prefill first."""

from kvstore.scheduler.simulator.coupled import CoupledServer, PrefillFirst
from kvstore.scheduler.simulator.decode import Gaps
from kvstore.scheduler.simulator.job import EventQueue, Job
from tests.scheduler.simulator.parts import cache, job, machine


class Served:
    """A server and whom it served; jobs in `refused` may not be decoded."""

    def __init__(
        self, *, capacity_tokens: int = 1_000_000, refused: tuple[int, ...] = (), order: type[CoupledServer] = PrefillFirst
    ) -> None:
        self.events = EventQueue()
        self.gaps = Gaps()
        self.ended: list[tuple[int, float, float]] = []
        facts = machine(capacity_tokens=capacity_tokens)
        self.server = order(
            facts,
            self.events,
            cache(),
            self.gaps,
            on_prefilled=lambda found: found.number not in refused,
            on_end=self._end,
        )

    def _end(self, found: Job) -> None:
        self.ended.append((found.number, found.first_token_s, found.finish_s))

    def give_at(self, at_s: float, found: Job) -> None:
        found.queued_s = at_s
        found.ready_s = max(at_s, found.ready_s)
        self.events.at(at_s, lambda: self.server.give(found))


def test_what_waits_and_what_is_decoded_counts_as_load() -> None:
    served = Served()
    served.give_at(0.0, job(0, tokens=1024, output=5, expected_s=1.0))
    served.give_at(0.5, job(1, tokens=512, output=5, expected_s=0.5))
    seen: list[tuple[float, int, int, int]] = []

    def look() -> None:
        server = served.server
        seen.append((server.queue_s(), server.waiting, server.sequences, server.context_tokens()))

    for at_s in (0.75, 1.25, 1.51):
        served.events.at(at_s, look)
    served.events.run()
    assert seen == [(0.75, 1, 1, 512), (0.25, 0, 1, 1025), (0.0, 0, 2, 1025 + 513)]
    assert (served.server.sequences, served.server.context_tokens(), served.server.used_tokens) == (0, 0, 0)


def test_a_prompt_without_room_waits_until_there_is_some() -> None:
    served = Served(capacity_tokens=1100)
    served.give_at(0.0, job(0, tokens=1024, output=5))
    served.give_at(0.0, job(1, tokens=1024, output=1))
    served.events.run()
    assert served.ended == [(0, 1.0, 1.0 + 20 / 64), (1, 2.0 + 20 / 64, 2.0 + 20 / 64)]


def test_a_prompt_waits_for_its_blocks_while_others_are_decoded() -> None:
    served = Served()
    served.give_at(0.0, job(0, tokens=1024, output=17))
    late = job(1, tokens=1024, output=1)
    late.ready_s = 1.5
    served.give_at(0.0, late)
    served.events.at(1.5, served.server.wake)
    served.events.run()
    # 16 steps of 5/64 s alone: at 1.5 the seventh runs, and the rest follow the other's prefill.
    assert served.ended == [(1, 2.0 + 35 / 64, 2.0 + 35 / 64), (0, 1.0, 2.0 + 80 / 64)]
    assert (late.queue_s, late.fetch_s) == (1.0 + 3 / 64, 0.5)


def test_who_may_not_be_decoded_leaves_after_its_prefill() -> None:
    served = Served(refused=(0,))
    served.give_at(0.0, job(0, output=5))
    served.give_at(0.0, job(1, output=2))
    served.events.run()
    assert served.ended == [(1, 2.0, 2.0 + 5 / 64)]
    assert served.server.used_tokens == 0
