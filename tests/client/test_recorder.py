"""Promises of recorder.py, with clusters of real processes: the prompts come back, and what is missing is said."""

import os
import signal
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pytest

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.cli.tools.replay import StoreReplay
from kvstore.client import Client
from kvstore.client.block_bytes import block_key
from kvstore.client.config import ClientSettings
from kvstore.client.recorder import REFRESH_S, Recorder
from kvstore.kvcache.traces.event_file import READ, REMOVED, STORED, BlockEvent, EventWriter, LostEvents, read_events
from kvstore.kvcache.traces.kv_events import read_prompts
from kvstore.kvcache.traces.named import generate
from kvstore.protocol.errors import InvalidArgument, ProtocolError, Unavailable
from kvstore.protocol.event_messages import EventBatch
from kvstore.store.block_table.event_log import RING_EVENTS
from kvstore.store.block_table.table import READ_EVENT_BLOCKS
from kvstore.testing.transfer.awaited import eventually
from kvstore.transfer.config import TransferSettings
from tests.client.embedded import embedded

BLOCK_BYTES = 256
FAR = TransferSettings(transports="tcp")
"""A client of another host: no node is its own, so its blocks go to all of them."""
TWO_SMALL_NODES = ClusterPlan(dram=str(300 * BLOCK_BYTES), nodes=2, is_private=True)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Reports(list[str]):
    """Messages of the recorder."""

    def has(self, *texts: str) -> bool:
        return len(self) == len(texts) and all(text in line for text, line in zip(texts, self, strict=True))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with embedded(TWO_SMALL_NODES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def fragile_cluster() -> Iterator[LocalCluster]:
    """Its nodes come back; the test that ends its master is the last to use it."""
    with embedded(TWO_SMALL_NODES) as cluster:
        yield cluster


def settings(cluster: LocalCluster, *, tenant: str = "") -> ClientSettings:
    return ClientSettings(master=cluster.address, tenant=tenant)


def kinds(events: Sequence[BlockEvent | LostEvents]) -> list[str]:
    return [event.kind if isinstance(event, BlockEvent) else "gap" for event in events]


def test_the_prompts_of_a_replay_come_back_from_its_recording(cluster: LocalCluster, tmp_path: Path) -> None:
    sent = list(islice(generate(seed=11), 150))
    heard = Reports()
    with (
        Client(cluster.address, settings=ClientSettings(ack="cluster"), transfer=FAR) as client,
        Recorder(settings(cluster), heard.append) as recorder,
        EventWriter(tmp_path / "file") as writer,
    ):
        replay = StoreReplay(client, block_bytes=BLOCK_BYTES)
        for request in sent:
            replay.request(request.hash_ids)
            writer.write(recorder.poll())
    ids = {block_key(block, BLOCK_BYTES): block for request in sent for block in request.hash_ids}
    order: dict[bytes, None] = {}
    removed, nodes = 0, set()
    for event in sorted(read_events(tmp_path / "file"), key=lambda event: event.timestamp_ms):
        assert isinstance(event, BlockEvent)
        nodes.add(event.node)
        if event.kind == REMOVED:
            removed += len(event.keys)
        else:
            order |= dict.fromkeys([*event.keys, *(parent for parent in event.parents if parent)])
    names = [ids[key] for key in order]
    found = [tuple(names[block] for block in request.hash_ids) for request in read_prompts(tmp_path / "file")]
    assert found == [request.hash_ids for request in sent]
    assert removed == recorder.counts.removed > 100
    assert recorder.counts.stored == replay.counts.stored
    assert recorder.counts.read == replay.counts.hits
    assert nodes == {"node-0", "node-1"}
    assert (recorder.counts.lost, recorder.counts.interruptions, heard) == (0, 0, [])


def test_only_the_tenants_own_blocks_are_recorded(cluster: LocalCluster) -> None:
    with (
        Client(cluster.address, tenant="red") as red,
        Client(cluster.address, tenant="blue") as blue,
        Recorder(settings(cluster, tenant="red"), Reports().append) as recorder,
    ):
        blue.put(b"theirs", b"1")
        red.put_batch([b"ours", b"next"], [b"1", b"22"], parents=[None, b"ours"])
        (event,) = recorder.poll()
    assert isinstance(event, BlockEvent)
    assert (event.kind, event.tenant) == (STORED, "red")
    assert (event.keys, event.parents, event.sizes_bytes) == ([b"ours", b"next"], [b"", b"ours"], [1, 2])


def test_a_recorder_that_falls_behind_is_told_how_much_it_lost(cluster: LocalCluster) -> None:
    keys = [b"%d" % number for number in range(200)]
    heard = Reports()
    with Client(cluster.address, tenant="busy") as client, Recorder(settings(cluster, tenant="busy"), heard.append) as recorder:
        client.put_batch(keys, [b"1"] * len(keys))
        reads = RING_EVENTS // len(keys) + 5
        for number in range(reads):
            client.get_batch(keys)
            if number % 10 == 0:
                client.put(keys[0], b"1")  # is there: but before it the node takes what was read, which it else does in its own time
        events = recorder.poll()
    told = sum(len(event.keys) for event in events if isinstance(event, BlockEvent))
    assert isinstance(events[0], LostEvents)
    assert events[0].lost == recorder.counts.lost == (reads + 1) * len(keys) - told
    assert RING_EVENTS - READ_EVENT_BLOCKS < told <= RING_EVENTS
    assert heard.has(f"overwrote {events[0].lost} events before they were fetched")


def test_a_node_that_leaves_is_said_and_a_gap_when_it_is_back(fragile_cluster: LocalCluster) -> None:
    clock, heard = Clock(), Reports()
    with Recorder(settings(fragile_cluster), heard.append, now_s=clock, wall_ms=lambda: 77.0) as recorder:
        assert recorder.nodes == ["node-0", "node-1"]
        fragile_cluster.kill_node(0)
        assert recorder.poll() == []
        clock.now_s += REFRESH_S
        recorder.poll()
        assert recorder.nodes == ["node-1"]
        assert heard.has("node node-0 is not recorded: ")
        fragile_cluster.restart_node(0)
        fragile_cluster.wait_ready()
        clock.now_s += REFRESH_S
        assert recorder.poll() == [LostEvents(77.0, "node-0", "", None)]
        assert recorder.nodes == ["node-0", "node-1"]
        assert heard.has("node node-0 is not recorded: ", "node node-0 is recorded from now on")
        assert recorder.counts.interruptions == 1


def test_a_master_that_is_away_is_said_once_and_ends_nothing(fragile_cluster: LocalCluster) -> None:
    clock, heard = Clock(), Reports()
    with Client(fragile_cluster.address) as client, Recorder(settings(fragile_cluster), heard.append, now_s=clock) as recorder:
        client.put(b"a", b"1")
        client.get(b"a")
        os.kill(fragile_cluster.master_pid, signal.SIGKILL)
        for _ in range(2):
            clock.now_s += REFRESH_S
            assert client.get(b"a") == b"1"
            assert kinds(recorder.poll())[-1] == READ
        assert heard.has("no master can be reached")


def test_without_a_master_there_is_nothing_to_begin_with() -> None:
    with pytest.raises(Unavailable, match="no master can be reached"):
        Recorder(ClientSettings(master="127.0.0.1:1"), Reports().append)
    for masters in ("nowhere", ""):
        with pytest.raises(InvalidArgument):
            Recorder(ClientSettings(master=masters), Reports().append)


@pytest.mark.parametrize(
    "batch",
    [
        EventBatch(1, 0, b"\x09", [5], [1], [b"a"], [1], [b""]),
        EventBatch(1, 0, b"\x01", [5], [2], [b"a"], [1], [b""]),
        EventBatch(1, 0, b"\x01\x01", [5, 6], [1, 0], [b"a"], [1], [b""]),
    ],
    ids=["an unknown kind", "blocks that are not there", "an event without blocks"],
)
def test_an_answer_that_cannot_be_understood_is_refused(cluster: LocalCluster, batch: EventBatch) -> None:
    with (
        Recorder(settings(cluster), Reports().append) as recorder,
        pytest.raises(ProtocolError, match="malformed events"),
    ):
        recorder._events("n0", batch)


def test_node_that_cannot_record_is_reported_and_retried(cluster: LocalCluster) -> None:
    """The node records for its maximum of tenants; recorders end, and it is retried."""
    clock, heard = Clock(), Reports()
    others = [Recorder(settings(cluster, tenant=f"tenant-{number}"), Reports().append) for number in range(16)]
    with Recorder(settings(cluster), heard.append, now_s=clock) as recorder:
        assert recorder.nodes == []
        assert heard.has(*["this node records events of 16 tenants already"] * 2)
        for other in others:
            other.close()

        def are_recorded() -> bool:
            clock.now_s += REFRESH_S
            recorder.poll()
            return len(recorder.nodes) == 2

        eventually(are_recorded, "the nodes hear of the end of a connection when they come to it")
    assert sorted(heard[2:]) == ["node node-0 is recorded from now on", "node node-1 is recorded from now on"]
