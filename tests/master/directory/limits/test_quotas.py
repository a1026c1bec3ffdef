"""Tests of quotas.py."""

import pytest

from kvstore.master.directory import records
from kvstore.master.directory.limits import quotas as tenant_limits
from kvstore.master.directory.limits.quotas import OperatorQuotas, TenantShare, share_of
from kvstore.protocol.errors import Full, InvalidArgument
from kvstore.security.quotas.limits import MAX_LIMIT, NamedLimits
from kvstore.security.quotas.quota import PINS, RESERVATIONS, Quota


def test_set_keeps_other_limits_and_records_all() -> None:
    quotas = OperatorQuotas({"red": {"pins": 3}})
    former = quotas.tenants
    assert quotas.set("red", {"pins": None, "blocks": 5}) == [records.put_quota("red", {"pins": None, "blocks": 5})]
    assert quotas.set("red", {"blocks": 5}) == [], "it is so already"
    assert quotas.set("", {"dram_bytes": MAX_LIMIT}) == [records.put_quota("", {"dram_bytes": MAX_LIMIT})]
    assert quotas.tenants == {"red": {"pins": None, "blocks": 5}, "": {"dram_bytes": MAX_LIMIT}}
    assert former == {"red": {"pins": 3}}


def test_clear_removes_some_limits_or_all() -> None:
    quotas = OperatorQuotas({"red": {"pins": 3, "blocks": 5, "connections": None}})
    assert quotas.clear("red", ["pins", "dram_bytes"]) == [records.put_quota("red", {"blocks": 5, "connections": None})]
    assert quotas.clear("red") == [records.delete_quota("red")]
    assert (quotas.clear("red"), quotas.clear("blue", ["pins"]), quotas.tenants) == ([], [], {})


@pytest.mark.parametrize(
    ("tenant", "limits", "told"),
    [
        ("red", {}, "set at least one of hbm_bytes, "),
        ("red", {"dram": 1}, "there is no limit 'dram'"),
        ("red", {"pins": -1}, "pins: -1 is no limit"),
        ("red", {"pins": MAX_LIMIT + 1}, "is no limit; it is at most"),
        ("t" * 129, {"pins": 1}, "at most 128 bytes"),
    ],
)
def test_bad_limits_are_refused_and_change_nothing(tenant: str, limits: NamedLimits, told: str) -> None:
    quotas = OperatorQuotas({"red": {"pins": 3}})
    with pytest.raises(InvalidArgument, match=told):
        quotas.set(tenant, limits)
    with pytest.raises(InvalidArgument, match="there is no limit 'dram'"):
        quotas.clear("red", ["dram"])
    assert quotas.tenants == {"red": {"pins": 3}}


def test_too_many_tenants_with_limits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_limits, "MAX_TENANTS", 1)
    quotas = OperatorQuotas({"red": {"pins": 3}})
    with pytest.raises(Full, match="1 tenants have limits set by operators: clear"):
        quotas.set("blue", {"pins": 3})
    assert quotas.set("red", {"pins": 4})


@pytest.mark.promise("partitions-hidden")
@pytest.mark.parametrize(
    ("whole", "partitions", "now"), [(0, 4, 0), (8, 1, 8), (8, 64, 8), (4096, 4, 1024), (4097, 4, 1025), (5000, 64, 1024)]
)
def test_share_is_an_even_part_of_the_limit_and_at_least_a_batch(whole: int, partitions: int, now: int) -> None:
    assert share_of(Quota(pins=whole), PINS, partitions) == TenantShare(now, whole)
    assert share_of(Quota(pins=whole), RESERVATIONS, partitions) is None


@pytest.mark.promise("partitions-hidden")
def test_refusal_names_the_whole_limit_and_the_share() -> None:
    assert str(TenantShare(8, 8).exceeded("red", PINS, used=8, more=1)) == (
        "tenant 'red' has 8 blocks pinned; 1 more exceed its quota of 8 (pins): let some go, or have the operator raise it"
    )
    assert str(TenantShare(2, 8).exceeded("red", RESERVATIONS, used=1, more=2)) == (
        "tenant 'red' has 1 puts granted and not published in one partition of the key space; 2 more exceed 2, the share of each partition "
        "in its quota of 8 (reservations): put fewer at once, or have the operator raise it"
    )
