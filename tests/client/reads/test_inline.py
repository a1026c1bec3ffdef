"""Values that come with the answer. Against a scripted cluster."""

from collections.abc import Iterator

import pytest

from kvstore.protocol.errors import (
    ChecksumMismatch,
    InvalidArgument,
)
from kvstore.protocol.node_messages import Blocks, Read
from tests.client.oracle import Oracle, OracleChannel, OracleNode
from tests.client.reads.gets import get, get_into

BIG = b"B" * 100_000


@pytest.fixture
def nodes() -> Iterator[tuple[OracleNode, OracleNode]]:
    local, remote = OracleNode(1, local=True), OracleNode(2, local=False)
    yield local, remote
    local.close()
    remote.close()


Pair = tuple[OracleNode, OracleNode]


def damaged(oracle: Oracle) -> object:
    def answer(channel: OracleChannel, message: Read) -> Blocks:
        blocks = oracle.answer(channel, message)
        assert isinstance(blocks, Blocks)
        channel.payload = b"X" + channel.payload[1:]
        return blocks

    return answer


def test_damaged_bytes_are_never_returned_and_another_replica_is_read(nodes: Pair) -> None:
    nodes[0].local = False
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"value", 1, 2)
    oracle.script[Read].append(damaged(oracle))  # type: ignore[arg-type]
    assert get(oracle, b"k") == [b"value"]
    assert oracle.resources.counters.snapshot().checksum_failures == 1


def test_a_block_with_no_undamaged_replica_is_an_error(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", b"value", 2)
    oracle.script[Read].extend([damaged(oracle)] * 3)  # type: ignore[list-item]
    with pytest.raises(ChecksumMismatch, match="node 2"):
        get(oracle, b"k")


def test_a_value_larger_than_its_buffer_is_refused_and_the_connection_stays_in_step(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"a", b"12345", 2)
    oracle.store(b"b", b"123", 2)
    buffers = [bytearray(2), bytearray(8)]
    with pytest.raises(InvalidArgument, match="the buffer of key 0 has 2 bytes, its value has 5"):
        get_into(oracle, [b"a", b"b"], buffers)
    assert all(loan.channel.payload == b"" and loan.channel.is_open for loan in oracle.loans)
    assert buffers[1][:3] == b"123"
