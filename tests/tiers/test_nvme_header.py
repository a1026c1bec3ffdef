"""Headers of the NVMe tier: what is packed is unpacked, and no flipped bit is."""

import pytest

from kvstore.tiers.lmdb_records import Header, pack_header, unpack_header
from kvstore.tiers.placements import Run

KEY = (7).to_bytes(8)
HEADERS = [
    Header(10, (1 << 64) - 1, (), b""),
    Header(5000, 1, (Run(3, 5),), b"tag"),
    Header(1 << 30, 0, (Run(1 << 40, (1 << 40) + 7), Run(0, 1)), bytes(range(256))),
]


@pytest.mark.parametrize("header", HEADERS)
def test_header_is_unpacked_as_it_was_packed(header: Header) -> None:
    assert unpack_header(KEY, pack_header(KEY, header)) == header


@pytest.mark.parametrize("header", HEADERS)
def test_header_with_any_bit_flipped_is_refused(header: Header) -> None:
    packed = pack_header(KEY, header)
    for bit in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert unpack_header(KEY, bytes(damaged)) is None
    assert unpack_header((8).to_bytes(8), packed) is None
