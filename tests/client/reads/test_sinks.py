"""Where values go. Against a scripted cluster."""

from collections.abc import Iterator

import pytest

from tests.client.oracle import Oracle, OracleNode
from tests.client.reads.gets import get_into

BIG = b"B" * 100_000


@pytest.fixture
def nodes() -> Iterator[tuple[OracleNode, OracleNode]]:
    local, remote = OracleNode(1, local=True), OracleNode(2, local=False)
    yield local, remote
    local.close()
    remote.close()


Pair = tuple[OracleNode, OracleNode]


def test_values_are_read_into_larger_buffers_and_their_sizes_told(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"a", BIG, 1)
    oracle.store(b"b", b"xyz", 1)
    buffers = [bytearray(BIG), bytearray(8), bytearray(1)]
    assert get_into(oracle, [b"a", b"b", b"c"], buffers) == [len(BIG), 3, None]
    assert bytes(buffers[0]) + bytes(buffers[1][:3]) == BIG + b"xyz"
