"""Reads by the transfer engine, against a scripted cluster: when it is used, and what happens when it cannot be."""

from functools import partial
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.client.core.effects import TransferEffect
from kvstore.client.reads import engine_fetch as fetching
from kvstore.client.reads import inline_values as slices
from kvstore.client.reads.batch_read import open_view
from kvstore.client.reads.mapped_values import OpenView
from kvstore.protocol.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    Denied,
    KVStoreError,
    ProtocolError,
    StaleHandle,
    Unavailable,
    Unreachable,
)
from kvstore.protocol.master_messages import Nodes
from kvstore.protocol.node_messages import ExportSlabs, ExportSlabsReply, ReadBlocks
from kvstore.transfer.paths.batch import Span
from tests.client.oracle import BIG, OTHER, MakeOracle, Oracle, OracleChannel, OracleNode
from tests.client.reads.gets import get, get_into


@pytest.fixture
def oracle(make_oracle: MakeOracle, far: OracleNode) -> Oracle:
    """With one block, `k`, on one node of another host."""
    oracle = make_oracle(far)
    oracle.store(b"k", BIG, 2)
    return oracle


def ways(oracle: Oracle) -> list[int]:
    """For each Read whether it asked for what the engine fetches."""
    return [message.engine for message in oracle.sent(ReadBlocks)]


def scribble(move: TransferEffect) -> None:
    """Damage the first copy."""
    cast(memoryview, move.copies[0][1])[:1] = b"X"


def test_large_remote_values_use_the_engine(oracle: Oracle) -> None:
    oracle.store(b"small", b"abc", 2)
    oracle.store(b"other", OTHER, 2)
    assert get(oracle, b"k", b"small", b"other", b"nowhere") == [BIG, b"abc", OTHER, None]
    [move] = oracle.moves
    assert [length for _, _, length in move.copies] == [len(BIG), len(OTHER)]
    assert oracle.releases() == [1]
    stats = oracle.resources.counters.snapshot()
    assert (stats.engine_bytes, stats.bytes_in, stats.hits, stats.misses, stats.retries) == (200_000, 200_003, 3, 1, 0)


def test_registered_memory_is_used_for_transfers(oracle: Oracle) -> None:
    oracle.store(b"other", OTHER, 2)
    pool, plain = bytearray(300_000), bytearray(100_000)
    registry = oracle.resources.engine_copies.registry
    with registry.add(pool, "cpu:0"):
        get_into(oracle, [b"k", b"other"], [memoryview(pool)[150_000:], plain])
        assert (bytes(pool[150_000:250_000]), bytes(plain)) == (BIG, OTHER)
        ends = [end for move in oracle.moves for _, end, _ in move.copies]
        assert [end.offset_bytes for end in ends if isinstance(end, Span)] == [150_000]
        assert len(ends) == 2
    get_into(oracle, [b"k"], [memoryview(pool)])
    assert bytes(pool[:100_000]) == BIG
    assert not isinstance(oracle.moves[-1].copies[0][1], Span)


def test_a_view_by_the_engine_is_a_private_copy(oracle: Oracle) -> None:
    view: OpenView | None = oracle.run(open_view(oracle.resources, b"k", oracle.deadline(), lambda: 1000))
    assert view is not None
    assert bytes(view.memory) == BIG
    assert view.connection is None
    assert len(oracle.moves) == 1
    assert oracle.releases() == [1]


@pytest.mark.promise("dead-node")
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
def test_what_the_engine_cannot_fetch_comes_by_message(oracle: Oracle, error: KVStoreError) -> None:
    oracle.script[TransferEffect].append(error)
    assert get(oracle, b"k") == [BIG]
    assert ways(oracle) == [1, 0]
    assert oracle.releases() == [1]
    assert get(oracle, b"k") == [BIG]
    assert ways(oracle) == [1, 0, 0], "it is left alone for a while"
    assert oracle.resources.counters.snapshot().engine_bytes == 0


def test_changed_links_are_used_at_once(oracle: Oracle, far: OracleNode) -> None:
    get(oracle, b"k")
    far.rail, far.revision = "eth1", 1
    asked = len(oracle.sent(Nodes))
    assert get(oracle, b"k") == [BIG]
    assert len(oracle.sent(Nodes)) == asked + 1, "the old way failed, and the master knew the new one"
    assert ways(oracle) == [1, 1, 1]
    assert get(oracle, b"k") == [BIG]
    assert ways(oracle) == [1, 1, 1, 1]


def test_slow_transfer_falls_back_to_messages(oracle: Oracle) -> None:
    oracle.script[TransferEffect].append(DeadlineExceeded("too slow"))
    with pytest.raises(DeadlineExceeded):
        get(oracle, b"k")
    assert not oracle.loans[-1].channel.is_open, "the lease ends with it"
    assert get(oracle, b"k") == [BIG]
    assert ways(oracle) == [1, 0]


@pytest.mark.promise("get-exact-bytes")
def test_damaged_transfer_is_read_from_another_replica(make_oracle: MakeOracle, far: OracleNode) -> None:
    oracle = make_oracle(far, OracleNode(3, local=False, has_engine=True))
    oracle.store(b"k", BIG, 2, 3)
    oracle.script[TransferEffect].append(scribble)
    assert get(oracle, b"k") == [BIG]
    stats = oracle.resources.counters.snapshot()
    assert (stats.checksum_failures, stats.retries, stats.hits) == (1, 1, 1)
    assert oracle.releases() == [1, 2]


def test_value_overwritten_after_its_lease_is_read_again(oracle: Oracle) -> None:
    times = iter([0, 10_000 * 1_000_000, 0, 0])  # asked at 0; verified when the lease of 10 s is over
    oracle.script[TransferEffect].append(scribble)
    assert get(oracle, b"k", now_ns=lambda: next(times)) == [BIG]
    stats = oracle.resources.counters.snapshot()
    assert (stats.checksum_failures, stats.retries) == (0, 1)
    assert ways(oracle) == [1, 1]


@pytest.mark.parametrize("others", [(), (3,)], ids=["no replica", "a replica elsewhere"])
def test_a_node_that_dies_before_its_slabs_are_shown_is_avoided(make_oracle: MakeOracle, far: OracleNode, others: tuple[int, ...]) -> None:
    oracle = make_oracle(far, OracleNode(3, local=False, has_engine=True))
    oracle.store(b"k", BIG, 2, *others)

    def dies(channel: OracleChannel, message: ExportSlabs) -> ExportSlabsReply:
        oracle.unreachable.add(far.tcp)
        channel.close()
        raise Unreachable("the connection broke")

    oracle.script[ExportSlabs].append(dies)
    assert get(oracle, b"k") == [BIG if others else None]


@pytest.mark.parametrize("others", [(), (3,)], ids=["no replica", "a replica elsewhere"])
def test_a_node_that_dies_while_it_is_read_is_avoided(make_oracle: MakeOracle, far: OracleNode, others: tuple[int, ...]) -> None:
    oracle = make_oracle(far, OracleNode(3, local=False, has_engine=True))
    oracle.store(b"k", BIG, 2, *others)
    get(oracle, b"k")

    def dies(move: TransferEffect) -> None:
        oracle.unreachable.add(far.tcp)
        oracle.loans[-1].channel.close()
        raise Unreachable("the connection broke")

    oracle.script[TransferEffect].append(dies)
    assert get(oracle, b"k") == [BIG if others else None]


FAULTS = ("works", "damages", "unreachable", "stale", "times out", "links change", "restarts")


@pytest.mark.promise("get-exact-bytes")
@given(st.lists(st.sampled_from(FAULTS), max_size=5), st.booleans())
@settings(max_examples=60)
def test_fetch_returns_right_values_or_raises(faults: list[str], has_replica: bool) -> None:
    nodes = [OracleNode(node_id, local=False, has_engine=True) for node_id in (2, 3)]
    oracle = Oracle(*nodes, engine_min_bytes=1)
    values = [b"a" * 20_000, b"b" * 20_000]
    oracle.store(b"a", values[0], *((2, 3) if has_replica else (2,)))
    oracle.store(b"b", values[1], 3)
    errors = {"unreachable": Unreachable("no path"), "stale": StaleHandle("closed"), "times out": DeadlineExceeded("too slow")}

    def change(move: TransferEffect, fault: str) -> None:
        for node in nodes:
            node.revision += 1
            node.rail = f"eth{node.revision}" if fault == "links change" else node.rail
            node.epoch += fault == "restarts"
        scribble(move)

    for fault in faults:
        if fault in errors:
            oracle.script[TransferEffect].append(errors[fault])
        else:
            oracle.script[TransferEffect].append({"works": lambda _: None, "damages": scribble}.get(fault, partial(change, fault=fault)))
    told = (DeadlineExceeded, ChecksumMismatch, Unreachable, StaleHandle)
    try:
        for _ in range(len(faults) + 1):
            try:
                assert get(oracle, b"a", b"b") == values
            except told:
                assert len(oracle.script[TransferEffect]) < len(faults), "only for a fault"
        oracle.script[TransferEffect].clear()
        oracle.resources.engine_copies.remote._clock_ns = lambda: 1 << 62  # all have rested
        assert get(oracle, b"a", b"b") == values, "nothing of it lasts"
    finally:
        oracle.resources.close()
        for node in nodes:
            node.close()


def test_single_large_value_is_fetched_in_slices(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fetching, slices):
        monkeypatch.setattr(module, "SLICE_BYTES", 30_000)
    assert get(oracle, b"k") == [BIG]
    assert [length for move in oracle.moves for _, _, length in move.copies] == [30_000] * 3 + [10_000]
    assert oracle.together == [2]
    assert oracle.releases() == [1]
    assert oracle.resources.counters.snapshot().engine_bytes == len(BIG)
    oracle.script[TransferEffect].append(scribble)
    with pytest.raises(ChecksumMismatch):
        get(oracle, b"k")
    assert oracle.resources.counters.snapshot().checksum_failures == 1


def test_single_large_batch_is_fetched_in_parts(make_oracle: MakeOracle, far: OracleNode, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_oracle(far, OracleNode(3, local=False, has_engine=True))
    for number, key in enumerate((b"a", b"b", b"c")):
        oracle.store(key, BIG if number % 2 else OTHER, 2, 3)
    monkeypatch.setattr(fetching, "SLICE_BYTES", 2 * len(BIG))
    oracle.script[TransferEffect].extend([lambda move: None, scribble])
    assert get(oracle, b"a", b"b", b"c") == [OTHER, BIG, OTHER]
    assert oracle.together == [2]
    assert [len(move.copies) for move in oracle.moves] == [2, 1, 1]
    assert [message.keys for message in oracle.sent(ReadBlocks)] == [[b"a", b"b", b"c"], [b"c"]], "only what was damaged is read again"


@pytest.mark.parametrize("failed", [0, 1])
def test_failed_part_falls_back_to_messages(make_oracle: MakeOracle, far: OracleNode, monkeypatch: pytest.MonkeyPatch, failed: int) -> None:
    oracle = make_oracle(far)
    oracle.store(b"a", BIG, 2)
    oracle.store(b"b", OTHER, 2)
    monkeypatch.setattr(fetching, "SLICE_BYTES", len(BIG))
    oracle.script[TransferEffect].extend([*[lambda move: None] * failed, Unreachable("no path")])
    assert get(oracle, b"a", b"b") == [BIG, OTHER]
    assert oracle.together == [2]
    assert oracle.releases() == [1]
