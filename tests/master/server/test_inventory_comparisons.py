"""Tests of inventory_comparisons.py: a reconnected node learns which of its runs the master knows; disconnects delay
no other node."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.master.directory.index.inventory_comparison import DigestComparison
from kvstore.master.leadership.leader import LeaderRole
from kvstore.protocol.catalog_messages import PHASE_SYNC, PHASE_SYNC_BEGIN, PHASE_SYNC_END, Digests
from kvstore.protocol.frames import pack_header
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.session_messages import Failure, Flags
from kvstore.testing.transfer.awaited import eventually
from tests.master.blocks import Event
from tests.master.directory.index.test_inventory_comparison import digests, events
from tests.master.running import NodeSide, Places, ask, master_in_thread

HELD = events(100)


@pytest.fixture(params=["all", "outliving"])
def places(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Places]:
    with master_in_thread(tmp_path, node_ttl_s=3600.0, records=request.param) as found:
        first = NodeSide(found)
        first.sync(*HELD)
        first.close()
        eventually(lambda: not leader(found).connected_nodes(), "the link is gone")
        yield found


def leader(places: Places) -> LeaderRole:
    assert places.master is not None
    return places.master.partitions[0].role_manager.leader()


def compared(places: Places) -> int:
    return leader(places).frames.counters["compared"]


def made(node: NodeSide, *held: Event, runs_a_message: int = 1000) -> list[Digests]:
    return digests(node.registration.registration_epoch, held, runs_a_message=runs_a_message)


def exists(places: Places, *keys: bytes) -> list[int]:
    client = places.client()
    try:
        return list(ask(client, Exists([*keys]), Flags).flags)
    finally:
        client.close()


def send(node: NodeSide, request_id: int, message: Digests) -> None:
    body = message.pack()
    node.sock.sendall(pack_header(Digests.TYPE, request_id, len(body), 0, 10_000) + body)


def test_returning_node_sends_only_differences(places: Places) -> None:
    node = NodeSide(places)
    assert node.registration.known_blocks == 100
    node.publish(phase=PHASE_SYNC_BEGIN)
    left = HELD[:-1]
    for number, message in enumerate(made(node, *left, runs_a_message=2)):
        send(node, 7 + number, message)
    answers = [node.read() for _ in range(2)]
    assert [(header.request_id, Flags.unpack(body).flags) for header, body in answers] == [(7, b"\1\1"), (8, b"\1\0")]
    node.publish(*left[96:], phase=PHASE_SYNC)
    node.publish(phase=PHASE_SYNC_END)
    assert exists(places, *(event.key for event in HELD)) == [1] * 99 + [0]
    assert compared(places) == 96
    node.close()


def test_invalid_digests_are_refused_and_later_ones_compared(places: Places) -> None:
    node = NodeSide(places)
    node.publish(phase=PHASE_SYNC_BEGIN)
    good = made(node, *HELD)[0]
    send(node, 6, Digests(good.epoch, 1, 1, [1], b"\1", [1], b"\2"))
    many = 201
    header, body = node.ask(Digests(good.epoch, 1, 0, list(range(2, many + 2)), b"\1" * many, [0] * many, b"\2" * many))
    assert header.type == Failure.TYPE, body
    assert "at most 200" in Failure.unpack(body).text
    assert Flags.unpack(node.ask(good)[1]).flags == b"\1" * 4
    node.publish(phase=PHASE_SYNC_END)
    header, body = node.ask(good)
    assert header.type == Failure.TYPE, body
    assert exists(places, HELD[0].key) == [1]
    node.close()


def test_disconnected_nodes_comparison_is_dropped(places: Places) -> None:
    gone = NodeSide(places)
    gone.publish(phase=PHASE_SYNC_BEGIN)
    (message,) = made(gone, *HELD)
    comparing = leader(places).frames.nodes._comparisons
    other = NodeSide(places, "two", 2)
    other.sync(*events(10, first=1000))
    other.close()
    retry = NodeSide(places, "two", 2)
    retry.publish(phase=PHASE_SYNC_BEGIN)
    (second,) = made(retry, *events(10, first=1000))
    send(gone, 5, message)
    gone.close()
    assert Flags.unpack(retry.ask(second)[1]).flags == b"\1"
    eventually(lambda: not comparing._queue and not comparing._asked, "nothing is left to be compared")
    retry.close()


def test_failed_comparison_causes_a_full_resync(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeSide(places)
    node.publish(phase=PHASE_SYNC_BEGIN)
    (message,) = made(node, *HELD)
    with monkeypatch.context() as patch:
        patch.setattr(DigestComparison, "_sum", lambda self, begin: 1 // 0)
        assert Flags.unpack(node.ask(message)[1]).flags == bytes(4)
    assert Flags.unpack(node.ask(message)[1]).flags == b"\1" * 4
    node.close()


def test_failed_response_disconnects_the_node(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeSide(places)
    node.publish(phase=PHASE_SYNC_BEGIN)
    (message,) = made(node, *HELD)
    with monkeypatch.context() as patch:
        patch.setattr(DigestComparison, "flags", lambda self: 1 // 0)
        send(node, 5, message)
        assert node.sock.recv(1) == b""
    node.close()
    eventually(lambda: not leader(places).connected_nodes(), "the link is gone")
    retry = NodeSide(places)
    retry.publish(phase=PHASE_SYNC_BEGIN)
    assert Flags.unpack(retry.ask(made(retry, *HELD)[0])[1]).flags == b"\1" * 4
    retry.close()
