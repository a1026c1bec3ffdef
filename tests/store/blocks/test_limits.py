"""Promises of limits.py."""

from collections.abc import Iterator

import pytest

from kvstore.store.blocks.limits import TierLimits
from kvstore.tiers.dram import DramTier
from tests.store.made import made


@pytest.fixture
def tier() -> Iterator[DramTier]:
    opened = DramTier(1000, slab_bytes=100)
    yield opened
    opened.close()


def test_without_limits_nobody_is_above_one(tier: DramTier) -> None:
    limits = TierLimits(tier)
    tier.allocate(100, tenant="red")
    assert (limits.are_any, limits.of("red"), limits.left_bytes("red"), limits.is_above("red")) == (False, None, None, False)
    limits.set({"red": None}, None)
    assert not limits.are_any


def test_what_a_tenant_has_counts_against_its_own_limit_or_else_the_default(tier: DramTier) -> None:
    limits = TierLimits(tier)
    for tenant in ("red", "red", "blue"):
        tier.allocate(100, tenant=tenant)
    limits.set({"red": 150, "green": None}, 200)
    assert limits.are_any
    assert [limits.left_bytes(tenant) for tenant in ("red", "blue", "green", "grey")] == [-50, 100, None, 200]
    assert limits.surplus == {"red"}
    limits.set({"red": 200}, None)
    assert (limits.are_any, limits.surplus, limits.left_bytes("blue")) == (True, set(), None)


def test_what_is_leaving_is_counted_until_it_has_left(tier: DramTier) -> None:
    limits, block = TierLimits(tier), made("red", b"a", 100, 1)
    limits.count_leaving(block, 1)
    limits.count_leaving(block, 1)
    limits.count_leaving(block, -1)
    limits.check_integrity({"red": 100})
    assert (limits.leaving_bytes("red"), limits.leaving_bytes("blue")) == (100, 0)
    limits.count_leaving(block, -1)
    limits.check_integrity({})
    with pytest.raises(AssertionError):
        limits.check_integrity({"red": 1})
