"""Values that come with the answer. Against a scripted cluster."""

import pytest

from kvstore.client.reads import inline_values as slices
from kvstore.protocol.errors import (
    ChecksumMismatch,
    InvalidArgument,
)
from kvstore.protocol.node_messages import ReadBlocks, ReadBlocksReply
from tests.client.oracle import Oracle, OracleChannel, Pair
from tests.client.reads.gets import get, get_into


def damaged(oracle: Oracle) -> object:
    def answer(channel: OracleChannel, message: ReadBlocks) -> ReadBlocksReply:
        blocks = oracle.answer(channel, message)
        assert isinstance(blocks, ReadBlocksReply)
        channel.payload = b"X" + channel.payload[1:]
        return blocks

    return answer


@pytest.mark.promise("get-exact-bytes")
def test_damaged_value_is_read_from_another_replica(nodes: Pair) -> None:
    nodes[0].local = False
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"value", 1, 2)
    oracle.script[ReadBlocks].append(damaged(oracle))  # type: ignore[arg-type]
    assert get(oracle, b"k") == [b"value"]
    assert oracle.resources.counters.snapshot().checksum_failures == 1


@pytest.mark.promise("get-exact-bytes")
def test_a_block_with_no_undamaged_replica_is_an_error(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"value", 2)
    oracle.script[ReadBlocks].extend([damaged(oracle)] * 3)  # type: ignore[list-item]
    with pytest.raises(ChecksumMismatch, match="node 2"):
        get(oracle, b"k")


def test_oversized_value_keeps_the_connection_in_step(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"a", b"12345", 2)
    oracle.store(b"b", b"123", 2)
    buffers = [bytearray(2), bytearray(8)]
    with pytest.raises(InvalidArgument, match="the buffer of key 0 has 2 bytes, its value has 5"):
        get_into(oracle, [b"a", b"b"], buffers)
    assert all(connection.channel.payload == b"" and connection.channel.is_open for connection in oracle.loans)
    assert buffers[1][:3] == b"123"


def test_values_that_come_in_several_slices_are_verified_whole(nodes: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "STREAM_BYTES", 1000)
    oracle = Oracle(*nodes)
    values = {b"a": b"a" * 2500, b"b": b"b" * 10, b"c": b"c" * 3000}
    for key, value in values.items():
        oracle.store(key, value, 2)
    buffers = [bytearray(2500), bytearray(2), bytearray(3000)]
    with pytest.raises(InvalidArgument, match="the buffer of key 1"):
        get_into(oracle, list(values), buffers)
    assert [bytes(buffers[0]), bytes(buffers[2])] == [values[b"a"], values[b"c"]]
    assert get(oracle, *values) == list(values.values())
    oracle.script[ReadBlocks].extend([damaged(oracle)] * 3)  # type: ignore[list-item]
    with pytest.raises(ChecksumMismatch, match="node 2"):
        get(oracle, b"a")
