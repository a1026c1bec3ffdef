"""Promises of quota.py."""

from kvstore.protocol import control_pb2 as pb
from kvstore.security.quotas.quota import NAMES, NO_QUOTA, UNLIMITED, Quota, Quotas, format_limits


def test_a_tenant_without_a_quota_of_its_own_has_the_default() -> None:
    quotas = Quotas(Quota(pins=1), {"red": Quota(dram_bytes=10)})
    assert quotas.of("red") == Quota(dram_bytes=10)
    assert quotas.of("blue") == Quota(pins=1)
    assert UNLIMITED.of("red") == NO_QUOTA


def test_limits_keep_their_places_which_records_of_catalogs_name() -> None:
    first = ("hbm_bytes", "dram_bytes", "nvme_bytes", "blocks", "pins", "reservations", "requests_in_flight", "connections")
    assert NAMES == (*first, "hbm_slabs", "dram_slabs")
    assert [pb.TenantQuota.DESCRIPTOR.fields_by_name[name].number for name in NAMES] == list(range(1, 11))


def test_equal_quotas_have_equal_versions_others_differ() -> None:
    red, blue = Quota(blocks=1), Quota(blocks=2)
    same = [Quotas(red, {"a": red, "b": blue}), Quotas(red, {"b": blue, "a": red})]
    others = [UNLIMITED, Quotas(red), Quotas(NO_QUOTA, {"a": red, "b": blue}), Quotas(red, {"a": blue, "b": red})]
    assert same[0].version == same[1].version
    assert len({quotas.version for quotas in [*others, same[0]]}) == 5
    assert 0 not in {quotas.version for quotas in others}


def test_limits_are_shown_in_peoples_units_and_exactly() -> None:
    quota = Quota(dram_bytes=96 << 30, nvme_bytes=(4 << 30) + 1, pins=12_000)
    assert format_limits(quota, ["pins", "dram_bytes"]) == "dram_bytes 96 GiB, pins 12,000"
    assert format_limits(quota, ["nvme_bytes", "blocks"]) == "nvme_bytes 4,294,967,297 B, blocks no limit"
    assert format_limits(quota, []) == ""
