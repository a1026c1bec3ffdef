"""Promises of replay.py, over a store in this process that can be small, and can lie."""

import itertools
import os
import signal
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cli.tools import replay
from kvstore.cli.tools.cluster import LocalCluster
from kvstore.cli.tools.replay import ReplayCounts, ReplayReport, StoreReplay, run_replay, settled_status
from kvstore.client.block_bytes import block_key
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Broken, Unavailable
from tests.client.embedded import embedded


class DictStore:
    """LRU over `capacity` blocks; `liar` may change what a read returns."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self.parents: dict[bytes, bytes | None] = {}
        self.namespaces: set[str] = set()

    def get_batch_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int | None]:
        sizes: list[int | None] = []
        for key, buffer in zip(keys, buffers, strict=True):
            value = self.blocks.get(key)
            if value is not None:
                self.blocks.move_to_end(key)
                buffer[: len(value)] = value
            sizes.append(None if value is None else len(value))
        return sizes

    def put_batch(
        self, keys: Sequence[bytes], values: Sequence[memoryview], *, namespace: str, parents: Sequence[bytes | None]
    ) -> list[bool]:
        self.namespaces.add(namespace)
        stored = []
        for key, value, parent in zip(keys, values, parents, strict=True):
            stored.append(key not in self.blocks)
            self.blocks[key], self.parents[key] = bytes(value), parent
            if len(self.blocks) > self.capacity:
                self.blocks.popitem(last=False)
        return stored


def prompt(*ids: int) -> TraceRequest:
    return TraceRequest(0, 512 * len(ids), 1, ids)


def ticking() -> float:
    """A clock that gains a second at every look."""
    return float(next(TICKS))


TICKS = itertools.count()


def test_prefix_hit_ratio_counts_the_leading_run() -> None:
    store = DictStore()
    counts = StoreReplay(store, block_bytes=16).run([prompt(0, 1, 2), prompt(0, 1, 3, 2), prompt(9, 0, 1)])
    assert (counts.requests, counts.blocks, counts.prefix_hits, counts.hits, counts.stored) == (3, 10, 2, 5, 5)
    assert counts.prefix_hit_ratio == 0.2
    assert counts.wrong_bytes == 0


def test_misses_are_stored_with_their_parents() -> None:
    store = DictStore()
    StoreReplay(store, block_bytes=16).run([prompt(5, 6), prompt(5, 7, 6, 8)])
    keys = {block: block_key(block, 16) for block in range(9)}
    assert store.parents == {keys[5]: None, keys[6]: keys[5], keys[7]: keys[5], keys[8]: keys[6]}
    assert store.namespaces == {replay.NAMESPACE}


def test_speeds_count_only_the_time_inside_the_store() -> None:
    counts = StoreReplay(DictStore(), block_bytes=16, clock=ticking).run([prompt(1, 2), prompt(1, 2)])
    assert (counts.get_s, counts.put_s) == (2.0, 1.0)
    assert (counts.get_bytes_per_s, counts.put_bytes_per_s) == (16.0, 32.0)
    assert (ReplayCounts().get_bytes_per_s, ReplayCounts().put_bytes_per_s) == (0.0, 0.0)


def test_one_wrong_byte_ends_the_replay_and_names_the_block() -> None:
    store = DictStore()
    engine = StoreReplay(store, block_bytes=16)
    engine.run([prompt(1, 2, 3)])
    key = block_key(2, 16)
    store.blocks[key] = bytes([store.blocks[key][0] ^ 1]) + store.blocks[key][1:]
    seen: list[int] = []
    counts = engine.run([prompt(1, 2, 3), prompt(4)], lambda: seen.append(engine.counts.requests))
    assert counts.wrong_bytes == 1
    assert counts.wrong_block == "block 2 (number 1 of request 2)"
    assert seen == [2]


@given(
    trace=st.lists(st.lists(st.integers(0, 12), max_size=12, unique=True), max_size=20),
    capacity=st.integers(1, 14),
    batch=st.integers(1, 5),
)
def test_replay_counts_match_naive_count_for_any_batching(trace: list[list[int]], capacity: int, batch: int) -> None:
    resident: OrderedDict[int, None] = OrderedDict()
    expected = 0
    for ids in trace:
        hits = [block for block in ids if block in resident]
        expected += sum(1 for _ in itertools.takewhile(resident.__contains__, ids))
        for block in hits:
            resident.move_to_end(block)
        for block in ids:
            if block not in hits:
                resident[block] = None
                if len(resident) > capacity:
                    resident.popitem(last=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "MAX_BATCH_BLOCKS", batch)
        counts = StoreReplay(DictStore(capacity), block_bytes=24).run([prompt(*ids) for ids in trace])
    assert counts.prefix_hits == expected
    assert counts.wrong_bytes == 0


def status(*evictions: int) -> pb.StatusReply:
    tiers = [
        pb.TierStatus(name="dram", capacity_bytes=100, used_bytes=50, blocks=5, evictions=count, hits=1, health="ok") for count in evictions
    ]
    return pb.StatusReply(nodes=[pb.NodeStatus(name=str(index), tiers=[tier]) for index, tier in enumerate(tiers)])


COUNTS = ReplayCounts(
    requests=2, blocks=8, prefix_hits=2, hits=3, stored=5, get_bytes=30, get_s=2.0, put_bytes=50, put_s=0.5, wrong_bytes=0, wrong_block=""
)
REPORT = ReplayReport(COUNTS, {"hbm": 0, "dram": 3}, status(1), status(4, 10), 10, 3.0)


def test_the_json_form_has_what_scripts_read() -> None:
    assert REPORT.as_dict() == {
        "requests": 2,
        "blocks": 8,
        "block_bytes": 10,
        "prefix_hit_ratio": 0.25,
        "hits": 3,
        "stored": 5,
        "wrong_bytes": 0,
        "hits_by_tier": {"hbm": 0, "dram": 3},
        "put_bytes_per_s": 100.0,
        "get_bytes_per_s": 15.0,
        "evictions": 13,
        "evictions_by_tier": {"dram": 13},
        "occupancy": {"dram": {"used_bytes": 100, "capacity_bytes": 200, "blocks": 10, "share": 0.5}},
        "seconds": 3.0,
    }


def test_settled_status_waits_for_a_report_of_every_node() -> None:
    with embedded() as cluster, Control(cluster.control_address, ClientSettings()) as control:
        found = settled_status(control)
        assert [node.state for node in found.nodes] == ["alive"]
        # The clock leaps ahead, so that the deadline has passed at the second poll.
        times = iter([0.0, 1e-9, 1e6])
        assert settled_status(control, clock=lambda: next(times), sleep=lambda seconds: None).nodes


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with embedded() as cluster:
        yield cluster


def prompts_with_a_murder(cluster: LocalCluster) -> Iterator[TraceRequest]:
    yield TraceRequest(0, 512, 1, (1, 2))
    os.kill(cluster.master_pid, signal.SIGKILL)
    yield TraceRequest(0, 512, 1, (3, 4))


def test_a_replay_reports_counts_and_the_clusters_change(cluster: LocalCluster) -> None:
    requests = [TraceRequest(0, 512, 1, (1, 2)), TraceRequest(0, 512, 1, (1, 3))]
    report = run_replay(ClientSettings(master=cluster.address), requests, total=2, block_bytes=4096, cluster=cluster)
    assert (report.counts.blocks, report.counts.prefix_hits, report.hits_by_tier["dram"]) == (4, 1, 1)
    assert report.after.blocks - report.before.blocks == 3
    assert 0 < report.seconds < 60


def test_replay_on_own_cluster_names_the_dead_daemon(cluster: LocalCluster) -> None:
    settings = ClientSettings(master=cluster.address, deadline_s=5)
    with pytest.raises(Broken, match=r"master .* was killed by SIGKILL"):
        run_replay(settings, prompts_with_a_murder(cluster), total=2, block_bytes=4096, cluster=cluster)


def test_of_another_cluster_it_is_what_the_client_saw(cluster: LocalCluster) -> None:
    with pytest.raises(Unavailable, match="no master can be reached"):
        run_replay(ClientSettings(master=cluster.address, deadline_s=5), prompts_with_a_murder(cluster), total=2, block_bytes=4096)
