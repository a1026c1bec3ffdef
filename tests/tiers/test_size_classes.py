"""Slot sizes: exact for a tenant's first sizes, at most an eighth larger for later ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.tiers.slab import SizeClasses, rounded_size


def test_the_first_sizes_of_a_tenant_are_exact_and_later_ones_round_up() -> None:
    classes = SizeClasses(10_000, exact_classes=2)
    assert [classes.slot_bytes(size_bytes, "red") for size_bytes in (101, 203, 305, 307, 101)] == [101, 203, 320, 320, 101]
    assert classes.slot_bytes(305, "blue") == 305


def test_a_rounded_size_never_exceeds_the_tier() -> None:
    assert SizeClasses(305, exact_classes=0).slot_bytes(305, "") == 305


@pytest.mark.parametrize("size_bytes", [-5, 0, 1001, MAX_VALUE_BYTES + 1])
def test_a_size_that_never_fits_is_misuse(size_bytes: int) -> None:
    with pytest.raises(InvalidArgument):
        SizeClasses(1000, exact_classes=2).slot_bytes(size_bytes, "")


@given(st.integers(1, MAX_VALUE_BYTES))
def test_rounding_wastes_at_most_an_eighth(size_bytes: int) -> None:
    assert size_bytes <= rounded_size(size_bytes) <= size_bytes * 9 / 8
    assert rounded_size(rounded_size(size_bytes)) == rounded_size(size_bytes)


def test_rounded_sizes_are_eight_a_doubling() -> None:
    assert len({rounded_size(size_bytes) for size_bytes in range(1025, 2049)}) == 8
