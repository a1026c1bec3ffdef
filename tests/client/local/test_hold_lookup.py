"""Lookups of a running node's blocks that hold what they find in shared memory: no message, and the node knows it before a block leaves."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.client import Client, new_hold
from kvstore.client.local.hold_lookup import LocalHoldLookup
from kvstore.client.local.reader_slots import LocalReaderSlots
from kvstore.protocol.shared_index import HOLD_WORDS
from kvstore.testing.transfer.awaited import eventually
from tests.client.local.test_reads import Requests, stored
from tests.client.processes import Cluster, cluster

SIZES = [4096] * 30


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        started.start_node("--dram", "64MiB")
        yield started


@pytest.fixture
def client(running: Cluster) -> Iterator[Client]:
    with Client(running.address) as client:
        yield client


def held_blocks(running: Cluster) -> int:
    with running.control() as control:
        return int(control.status().nodes[0].counters["held_blocks"])


def test_what_is_here_is_held_and_released_without_a_message(client: Client, running: Cluster) -> None:
    keys, _ = stored(client, SIZES)
    requests, hold = Requests(client), new_hold(30)
    assert client.match_prefix(keys, hold=hold) == len(keys)
    assert client.exists_batch(keys[::-1], hold=hold) == [True] * len(keys)
    assert client.exists(keys[0], hold=hold)
    assert requests.count == 0
    eventually(lambda: held_blocks(running) == len(keys), "the node to know of the hold")
    client.release(hold)
    assert requests.count == 0
    eventually(lambda: not held_blocks(running), "the node to know of its end")


def test_only_what_leads_a_prefix_is_held(client: Client, running: Cluster) -> None:
    keys, _ = stored(client, SIZES)
    hold = new_hold(30)
    asked = [*keys[:7], b"nowhere", *keys[7:]]
    assert client.match_prefix(asked, hold=hold) == 7
    eventually(lambda: held_blocks(running) == 7, "the node to know of the hold")
    assert client.exists_batch(asked, hold=hold) == [True] * 7 + [False] + [True] * (len(keys) - 7)
    eventually(lambda: held_blocks(running) == len(keys), "the node to know of the rest")
    client.release(hold)
    eventually(lambda: not held_blocks(running), "the node to know of its end")


def test_what_left_before_the_node_could_know_is_not_found_here(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, _ = stored(client, SIZES)
    hold = LocalReaderSlots.hold

    def and_one_leaves(reader_slots: LocalReaderSlots, number: int, until_ns: int, accesses: Any) -> bool:
        is_held = hold(reader_slots, number, until_ns, accesses)
        client.remove(keys[3:4], force=True)
        return is_held

    monkeypatch.setattr(LocalReaderSlots, "hold", and_one_leaves)
    nodes = client._operations.local.fresh()
    outcome = LocalHoldLookup(nodes, keys, {16}).hold(2, 1 << 62, is_prefix=False)
    assert outcome.is_here.tolist() == [number != 3 for number in range(len(keys))]


def test_more_than_the_ring_has_room_for_is_found_without_a_hold(client: Client) -> None:
    keys, _ = stored(client, [100] * 50)
    many = keys * (HOLD_WORDS // len(keys) + 1)
    assert client.exists_batch(many, hold=new_hold(30)) == [True] * len(many)
    assert (client.stats().held_blocks, client.stats().unheld_blocks) == (0, len(many))
