"""Writes by the transfer engine, against a scripted cluster: when it is used, and what happens when it cannot be."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.client.core.effects import GatherEffect, Operation, TransferEffect
from kvstore.client.writes import engine_put as by_engine
from kvstore.protocol.errors import (
    CatalogUnavailable,
    DeadlineExceeded,
    Denied,
    Full,
    InvalidArgument,
    KVStoreError,
    ProtocolError,
    StaleHandle,
    Unavailable,
    Unreachable,
)
from kvstore.protocol.master_messages import CancelReservations, Reserve
from kvstore.protocol.node_messages import CommitPuts, OpenSlots, Put
from kvstore.protocol.session_messages import Flags
from tests.client.oracle import BIG, OTHER, MakeOracle, Oracle, OracleNode
from tests.client.writes.puts import put


@pytest.fixture
def oracle(make_oracle: MakeOracle, far: OracleNode) -> Oracle:
    return make_oracle(far)


def stored(node: OracleNode) -> dict[bytes, bytes]:
    return {key: value for key, (value, _) in node.blocks.items()}


def names(oracle: Oracle) -> list[str]:
    return [type(message).__name__ for message in oracle.log]


def test_large_remote_values_are_written_by_the_engine(oracle: Oracle, far: OracleNode) -> None:
    assert put(oracle, [b"a", b"small", b"b"], [BIG, b"abc", OTHER]) == [True] * 3
    assert names(oracle) == ["Nodes", "Reserve", "OpenSlots", "CommitPuts", "Put"]
    assert stored(far) == {b"a": BIG, b"small": b"abc", b"b": OTHER}
    assert [length for _, _, length in oracle.moves[0].copies] == [len(BIG), len(OTHER)]
    stats = oracle.resources.counters.snapshot()
    assert (stats.puts, stats.bytes_out, stats.engine_bytes, stats.retries) == (3, 200_003, 200_000, 0)


@pytest.mark.parametrize(
    "error",
    [
        Unreachable("no path"),
        Unavailable("all connections are in use"),
        StaleHandle("the region is closed"),
        Denied("wrong key"),
        ProtocolError("another version"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_engine_cannot_write_is_sent(oracle: Oracle, far: OracleNode, error: KVStoreError) -> None:
    oracle.script[TransferEffect].append(error)
    assert put(oracle, [b"a", b"small"], [BIG, b"abc"]) == [True, True]
    assert names(oracle) == ["Nodes", "Reserve", "OpenSlots", "Nodes", "Put"]
    opening = next(connection for connection in oracle.loans if not connection.channel.is_open)
    assert str(opening.channel.address) == far.tcp, "the node forgets the puts of a connection that ends"
    assert put(oracle, [b"b"], [OTHER]) == [True]
    assert len(oracle.sent(OpenSlots)) == 1, "the engine is left alone for a while"
    assert stored(far) == {b"a": BIG, b"small": b"abc", b"b": OTHER}
    assert oracle.resources.counters.snapshot().engine_bytes == 0


def test_slow_transfer_falls_back_to_messages(oracle: Oracle, far: OracleNode) -> None:
    oracle.script[TransferEffect].append(DeadlineExceeded("too slow"))
    with pytest.raises(DeadlineExceeded):
        put(oracle, [b"a"], [BIG])
    assert oracle.reserved == set()
    assert put(oracle, [b"a"], [BIG]) == [True]
    assert len(oracle.sent(OpenSlots)) == 1
    assert stored(far) == {b"a": BIG}


@pytest.mark.promise("dead-node")
def test_a_node_that_dies_while_it_is_written_is_avoided(make_oracle: MakeOracle, far: OracleNode) -> None:
    other = OracleNode(3, local=False, has_engine=True)
    oracle = make_oracle(far, other)

    def dies(move: TransferEffect) -> None:
        oracle.unreachable.add(far.tcp)
        oracle.loans[-1].channel.close()
        raise Unreachable("the connection broke")

    oracle.script[TransferEffect].append(dies)
    assert put(oracle, [b"a"], [BIG]) == [True]
    assert [message.avoid for message in oracle.sent(Reserve)] == [0, 2]
    assert (stored(far), stored(other)) == ({}, {b"a": BIG})


def test_a_full_node_is_an_error_and_reservations_are_given_back(oracle: Oracle) -> None:
    oracle.script[OpenSlots].append(Full("no room"))
    with pytest.raises(Full):
        put(oracle, [b"a"], [BIG])
    assert oracle.reserved == set()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InvalidArgument("the slot is smaller")], ids=lambda error: type(error).__name__)
def test_other_transfer_errors_propagate_and_free_the_slots(oracle: Oracle, error: BaseException) -> None:
    oracle.script[TransferEffect].append(error)
    with pytest.raises(type(error)):
        put(oracle, [b"a"], [BIG])
    assert [connection.channel.is_open for connection in oracle.loans if str(connection.channel.address) == "node2:1"] == [False]


# --- in parts ---


class Interleaved(Oracle):
    """Operations that are carried out at once take turns, an effect each."""

    def _do(self, effect: Any) -> Any:
        if not isinstance(effect, GatherEffect):
            return super()._do(effect)
        self.together.append(len(effect.operations))
        waiting: deque[tuple[Operation[Any], Any, BaseException | None]] = deque((operation, None, None) for operation in effect.operations)
        while waiting:
            operation, result, error = waiting.popleft()
            try:
                wanted = operation.throw(error) if error is not None else operation.send(result)
            except StopIteration:
                continue
            try:
                waiting.append((operation, super()._do(wanted), None))
            except KVStoreError as failure:
                waiting.append((operation, None, failure))
        return [None] * self.together[-1]


KEYS = [b"a", b"b", b"c", b"d"]
VALUES = [BIG, OTHER, OTHER, BIG]


@pytest.fixture
def parted(far: OracleNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Interleaved]:
    """Each value of BIG's size is a part."""
    monkeypatch.setattr(by_engine, "PART_BYTES", len(BIG))
    oracle = Interleaved(far, engine_min_bytes=50_000)
    yield oracle
    oracle.resources.close()
    far.close()


@pytest.mark.promise("dead-node")
def test_only_failed_parts_are_sent_by_message(parted: Interleaved, far: OracleNode) -> None:
    parted.script[TransferEffect].extend([lambda move: None, Unreachable("no path"), lambda move: None])
    assert put(parted, KEYS, VALUES) == [True] * 4
    assert [message.keys for message in parted.sent(Put)] == [[b"c"]]
    assert parted.sent(CancelReservations) == []
    assert stored(far) == dict(zip(KEYS, VALUES, strict=True))


def test_parts_that_arrived_damaged_are_written_again(parted: Interleaved, far: OracleNode) -> None:
    parted.script[CommitPuts].extend([Flags(b"\1\1"), Flags(b"\2\0")])
    assert put(parted, KEYS, VALUES) == [True, True, True, False]
    assert [message.keys for message in parted.sent(OpenSlots)] == [KEYS, [b"c"]]


def test_failed_engine_commit_frees_the_slots(parted: Interleaved) -> None:
    parted.script[CommitPuts].append(CatalogUnavailable("no"))
    with pytest.raises(CatalogUnavailable):
        put(parted, KEYS, VALUES)
    assert parted.reserved == set()
    assert [connection.channel.is_open for connection in parted.loans if str(connection.channel.address) == "node2:1"] == [False]
