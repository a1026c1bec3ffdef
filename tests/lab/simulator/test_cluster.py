"""Promises of cluster.py. A block is half a second of prefill, of sending and 1/32 s of loading."""

from typing import Any

import pytest

from kvstore.lab.simulator.cluster import Callbacks, SimulatedCluster, make_cluster
from kvstore.lab.simulator.job import EventQueue, SimulatedJob
from kvstore.lab.simulator.plan import Mode, SimulationPlan
from kvstore.scheduler.request import Decision, DecodeInstance, PrefillInstance
from tests.lab.simulator.parts import job, machine

SEND = float(1 << 20)


class Played:
    """A cluster, and what became of its jobs."""

    def __init__(self, *, may_decode: bool = True, **plan: Any) -> None:
        self.events = EventQueue()
        self.ended: list[tuple[int, float]] = []
        callbacks = Callbacks(lambda found: may_decode, self._end)
        self.cluster: SimulatedCluster = make_cluster(
            SimulationPlan(**{"prefill": 2, "decode": 2, **plan}), machine(), self.events, callbacks
        )

    def _end(self, found: SimulatedJob) -> None:
        self.ended.append((found.number, found.finish_s))

    def start(self, found: SimulatedJob, **decided: Any) -> SimulatedJob:
        facts = {"prefill": 0, "decode": 0, "prefix_blocks": 0, "transfer_from": None, "transfer_blocks": 0, "prefill_s": 1.0}
        decision = Decision(**(facts | decided), transfer_s=0.0, queue_s=0.0, tbt_s=0.0)
        self.cluster.start(found, decision)
        return found


def test_cluster_streams_cache_during_prefill() -> None:
    played = Played()
    found = played.start(job(tokens=1024, output=5))
    played.events.run()
    # 1 s of prefill, 1 s of sending during it, a fourth of which cannot begin before the end.
    assert (found.first_token_s, found.stream_s) == (1.0, 0.25)
    assert played.ended == [(0, 1.25 + 20 / 64)]
    assert played.cluster.streamed_bytes == 1 << 20


def test_without_overlap_it_is_sent_after_the_prefill() -> None:
    played = Played(overlap=False)
    found = played.start(job(tokens=1024, output=5))
    played.events.run()
    assert (found.first_token_s, found.stream_s) == (1.0, 1.0)
    assert played.ended == [(0, 2.0 + 20 / 64)]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_single_token_is_not_decoded(overlap: bool) -> None:
    played = Played(overlap=overlap)
    played.start(job(tokens=1024, output=1))
    played.events.run()
    assert (played.ended, played.cluster.streamed_bytes) == ([(0, 1.0)], 0)
    assert [view.batch for view in played.cluster.decode_views()] == [0, 0]


def test_cluster_fetches_remote_blocks_and_caches_them() -> None:
    played = Played()
    played.start(job(0, keys=[1, 2, 3], tokens=1536))
    played.events.run()
    assert played.cluster.match([1, 2, 3]) == [3, 0]
    found = job(1, keys=[1, 2, 3, 4], tokens=2048)
    played.start(found, prefill=1, prefix_blocks=3, transfer_from=0, transfer_blocks=3, prefill_s=0.5)
    views = played.cluster.prefill_views()
    assert views == [PrefillInstance("prefill 0", 0.0, 3 * 512 * 1024, SEND), PrefillInstance("prefill 1", 2.0, 0, SEND)]
    assert played.cluster.fetched_bytes == 3 * 512 * 1024
    played.events.run()
    assert (found.fetch_s, found.prefix_blocks, found.first_token_s) == (1.5, 3, 1.5 + 1.5 + 0.5 + 3 / 32 / 4)
    assert played.cluster.match([1, 2, 3, 4]) == [3, 4]


def test_a_promise_is_seen_before_the_cache_arrives() -> None:
    played = Played()
    played.start(job(tokens=1024, output=5), decode=1)
    assert played.cluster.decode_views()[1] == DecodeInstance("decode 1", 1, 1024, 1_000_000)
    assert played.cluster.prefill_views()[0] == PrefillInstance("prefill 0", 1.0, 1 << 20, SEND)


@pytest.mark.parametrize("mode", [Mode.PREFILL_FIRST, Mode.DECODE_FIRST, Mode.CHUNKED])
def test_coupled_instances_decode_what_they_computed(mode: Mode) -> None:
    played = Played(mode=mode)
    assert len(played.cluster.prompters) == len(played.cluster.loops) == 4
    found = played.start(job(keys=[1, 2], tokens=1024, output=5), prefill=3, decode=1)
    played.events.run()
    assert (found.first_token_s, played.ended) == (1.0, [(0, 1.0 + 20 / 64)])
    assert [loop.busy_s > 0 for loop in played.cluster.loops] == [False, False, False, True]
    assert (played.cluster.streamed_bytes, played.cluster.match([1, 2])) == (0, [0, 0, 0, 2])
