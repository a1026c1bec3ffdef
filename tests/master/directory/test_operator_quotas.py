"""Promises of operator_quotas.py."""

import pytest

from kvstore.master.directory import operator_quotas, records
from kvstore.master.directory.operator_quotas import OperatorQuotas
from kvstore.protocol.errors import Full, InvalidArgument
from kvstore.security.quotas.limits import MAX_LIMIT, NamedLimits


def test_what_is_set_is_kept_beside_what_was_and_the_record_has_all_of_it() -> None:
    quotas = OperatorQuotas({"red": {"pins": 3}})
    former = quotas.tenants
    assert quotas.set("red", {"pins": None, "blocks": 5}) == [records.put_quota("red", {"pins": None, "blocks": 5})]
    assert quotas.set("red", {"blocks": 5}) == [], "it is so already"
    assert quotas.set("", {"dram_bytes": MAX_LIMIT}) == [records.put_quota("", {"dram_bytes": MAX_LIMIT})]
    assert quotas.tenants == {"red": {"pins": None, "blocks": 5}, "": {"dram_bytes": MAX_LIMIT}}
    assert former == {"red": {"pins": 3}}


def test_some_limits_are_cleared_or_all_and_a_tenant_without_any_has_no_record() -> None:
    quotas = OperatorQuotas({"red": {"pins": 3, "blocks": 5, "connections": None}})
    assert quotas.clear("red", ["pins", "dram_bytes"]) == [records.put_quota("red", {"blocks": 5, "connections": None})]
    assert quotas.clear("red") == [records.delete_quota("red")]
    assert (quotas.clear("red"), quotas.clear("blue", ["pins"]), quotas.tenants) == ([], [], {})


@pytest.mark.parametrize(
    ("tenant", "limits", "told"),
    [
        ("red", {}, "say at least one limit to set: hbm_bytes, "),
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


def test_more_tenants_than_nodes_are_told_of_in_a_message_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_quotas, "MAX_TENANTS", 1)
    quotas = OperatorQuotas({"red": {"pins": 3}})
    with pytest.raises(Full, match="1 tenants have limits set by operators: clear"):
        quotas.set("blue", {"pins": 3})
    assert quotas.set("red", {"pins": 4})
