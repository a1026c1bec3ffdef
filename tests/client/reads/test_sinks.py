"""Where values go. Against a scripted cluster."""

from tests.client.oracle import BIG, Oracle, Pair
from tests.client.reads.gets import get_into


def test_values_are_read_into_larger_buffers_and_their_sizes_told(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"a", BIG, 1)
    oracle.store(b"b", b"xyz", 1)
    buffers = [bytearray(BIG), bytearray(8), bytearray(1)]
    assert get_into(oracle, [b"a", b"b", b"c"], buffers) == [len(BIG), 3, None]
    assert bytes(buffers[0]) + bytes(buffers[1][:3]) == BIG + b"xyz"
