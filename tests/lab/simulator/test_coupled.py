"""Promises of coupled.py, by small cases: a prompt of 1024 tokens takes 1 s, a decode step 4/64 s and 1/64 s more a sequence."""

import pytest

from kvstore.lab.simulator.coupled import Chunked, CoupledServer, DecodeFirst, PrefillFirst
from kvstore.lab.simulator.decode import Gaps
from kvstore.lab.simulator.job import EventQueue, SimulatedJob
from tests.lab.simulator.parts import cache, job, machine

MS = 1 / 64


class Served:
    """A server and the times of its jobs' first and last tokens, in order of their ends. Jobs in `refused` are rejected after prefill."""

    def __init__(
        self, order: type[CoupledServer] = PrefillFirst, *, capacity_tokens: int = 1_000_000, refused: tuple[int, ...] = (), **more: int
    ) -> None:
        self.events = EventQueue()
        self.gaps = Gaps()
        self.times: dict[int, tuple[float, float]] = {}
        facts = machine(capacity_tokens=capacity_tokens)
        self.server = order(
            facts, self.events, cache(), self.gaps, on_prefilled=lambda found: found.number not in refused, on_end=self._end, **more
        )

    def _end(self, found: SimulatedJob) -> None:
        self.times[found.number] = (found.first_token_s, found.finish_s)

    def give_at(self, at_s: float, found: SimulatedJob) -> SimulatedJob:
        found.queued_s = at_s
        found.ready_s = max(at_s, found.ready_s)
        self.events.at(at_s, lambda: self.server.enqueue(found))
        return found


def test_what_waits_and_what_is_decoded_counts_as_load() -> None:
    served = Served()
    served.give_at(0.0, job(0, tokens=1024, output=5, expected_s=1.0))
    served.give_at(0.5, job(1, tokens=512, output=5, expected_s=0.5))
    seen: list[tuple[float, int, int]] = []

    def look() -> None:
        server = served.server
        seen.append((server.queue_s(), server.sequences, server.context_tokens()))

    for at_s in (0.75, 1.25, 1.51):
        served.events.at(at_s, look)
    served.events.run()
    assert seen == [(0.75, 1, 512), (0.25, 1, 1025), (0.0, 2, 1025 + 513)]
    assert (served.server.sequences, served.server.context_tokens(), served.server.used_tokens) == (0, 0, 0)


def test_a_prompt_without_room_waits_until_there_is_some() -> None:
    served = Served(capacity_tokens=1100)
    served.give_at(0.0, job(0, tokens=1024, output=5))
    served.give_at(0.0, job(1, tokens=1024, output=1))
    served.events.run()
    assert list(served.times.items()) == [(0, (1.0, 1.0 + 20 / 64)), (1, (2.0 + 20 / 64, 2.0 + 20 / 64))]


def test_a_prompt_waits_for_its_blocks_while_others_are_decoded() -> None:
    served = Served()
    served.give_at(0.0, job(0, tokens=1024, output=17))
    late = job(1, tokens=1024, output=1)
    late.ready_s = 1.5
    served.give_at(0.0, late)
    served.events.at(1.5, served.server.wake)
    served.events.run()
    # 16 steps of 5/64 s alone: at 1.5 the seventh runs, and the rest follow the other's prefill.
    assert list(served.times.items()) == [(1, (2.0 + 35 / 64, 2.0 + 35 / 64)), (0, (1.0, 2.0 + 80 / 64))]
    assert (late.queue_s, late.fetch_s) == (1.0 + 3 / 64, 0.5)


def test_who_may_not_be_decoded_leaves_after_its_prefill() -> None:
    served = Served(refused=(0,))
    served.give_at(0.0, job(0, output=5))
    served.give_at(0.0, job(1, output=2))
    served.events.run()
    assert served.times == {1: (2.0, 2.0 + 5 / 64)}
    assert served.server.used_tokens == 0


def test_prefill_first_stalls_the_batch() -> None:
    served = Served(PrefillFirst)
    served.give_at(0.0, job(0, tokens=1024, output=5))
    served.give_at(1.0 + 6 * MS, job(1, tokens=1024, output=3))
    served.events.run()
    # The second comes in the second step: it is computed after it, from 1 + 10/64 on.
    assert served.times == {0: (1.0, 2.0 + 22 * MS), 1: (2.0 + 10 * MS, 2.0 + 22 * MS)}
    assert served.gaps.points() == [(5 * MS, 2 / 6), (6 * MS, 5 / 6), (1.0 + 6 * MS, 1.0)]


def test_decode_first_lets_nobody_in_before_the_batch_is_done() -> None:
    served = Served(DecodeFirst)
    served.give_at(0.0, job(0, tokens=1024, output=5))
    first = served.give_at(0.5, job(1, tokens=1024, output=3, expected_s=1.0))
    second = served.give_at(1.0 + 6 * MS, job(2, tokens=512, output=2, expected_s=0.5))
    seen: list[float] = []
    served.events.at(1.0 + 7 * MS, lambda: seen.append(served.server.queue_s()))
    served.events.run()
    # Both wait for the four steps of the first, and have their first tokens together.
    assert served.times == {0: (1.0, 1.0 + 20 * MS), 1: (2.5 + 20 * MS, 2.5 + 31 * MS), 2: (2.5 + 20 * MS, 2.5 + 26 * MS)}
    assert served.gaps.points() == [(5 * MS, 5 / 7), (6 * MS, 1.0)]
    assert (first.prefill_s, second.prefill_s, first.queue_s, second.queue_s) == (1.5, 1.5, 0.5 + 20 * MS, 14 * MS)
    # While it is decoded: what waits, and four steps as they are when it began.
    assert seen == [1.5 + 20 * MS]
    assert served.server.queue_s() == 0.0


def test_chunks_share_steps_with_the_batch() -> None:
    served = Served(Chunked, chunk_tokens=512)
    served.give_at(0.0, job(0, tokens=1024, output=5))
    long = served.give_at(1.0 + 6 * MS, job(1, tokens=1100, output=3, expected_s=1.1))
    seen: list[float] = []
    served.events.at(1.0 + 11 * MS, lambda: seen.append(served.server.queue_s()))
    served.events.at(2.0 + 13 * MS, lambda: seen.append(served.server.queue_s()))
    served.events.run()
    # Two steps alone, then two with 512 tokens of the other: the batch is done, and what is left is computed alone.
    chunks_s = 2 * (0.5 + MS)
    last_s = (1100 - 1024) / 1024
    first_s = 1.0 + 10 * MS + chunks_s + last_s
    assert served.times == {0: (1.0, 1.0 + 10 * MS + chunks_s), 1: (first_s, first_s + 10 * MS)}
    assert long.prefill_s == pytest.approx(chunks_s + last_s)
    assert served.gaps.points() == [(5 * MS, 4 / 6), (0.5 + MS, 1.0)]
    # Prefills have their chunks' own time, decoding what its sequences add.
    assert served.server.busy_s == 1.0 + 1.0 + last_s
    assert served.server.loop.busy_s == pytest.approx(20 * MS + 2 * MS)
    assert served.server.flops == 1000.0 * (1024 + 1100)
    # In the first chunk: the rest of it, and what comes after; in the last one nothing comes after.
    assert seen == [pytest.approx(0.5 + (1100 - 512) / 1024), pytest.approx(first_s - 2.0 - 13 * MS)]


def test_chunked_prompt_starts_after_prefix_with_one_load() -> None:
    served = Served(Chunked, chunk_tokens=256)
    served.server.cache.insert([1, 2], first=0)
    found = served.give_at(0.0, job(0, keys=[1, 2, 3], tokens=1536, output=1))
    served.events.run()
    assert (found.prefix_tokens, found.load_s, found.prefill_s) == (1024, 1 / 64, 0.5)
    assert served.times == {0: (0.5 + 1 / 64, 0.5 + 1 / 64)}
    assert served.server.queue_s() == 0.0
