"""Promises of quota.py."""

from kvstore.security.quotas.quota import NO_QUOTA, UNLIMITED, Quota, Quotas, unlimited


def test_a_tenant_without_a_quota_of_its_own_has_the_default() -> None:
    quotas = Quotas(Quota(pins=1), {"red": Quota(dram_bytes=10)})
    assert quotas.of("red") == Quota(dram_bytes=10)
    assert quotas.of("blue") == Quota(pins=1)
    assert UNLIMITED.of("red") == unlimited("red") == NO_QUOTA


def test_a_quota_names_its_limits_and_its_tiers() -> None:
    quota = Quota(hbm_bytes=1, nvme_bytes=0, connections=4)
    assert quota.limits() == {"hbm_bytes": 1, "nvme_bytes": 0, "connections": 4}
    assert [quota.of_tier(index) for index in range(3)] == [1, None, 0]


def test_quotas_that_say_the_same_have_one_version_and_others_another() -> None:
    red, blue = Quota(blocks=1), Quota(blocks=2)
    same = [Quotas(red, {"a": red, "b": blue}), Quotas(red, {"b": blue, "a": red})]
    others = [UNLIMITED, Quotas(red), Quotas(NO_QUOTA, {"a": red, "b": blue}), Quotas(red, {"a": blue, "b": red})]
    assert same[0].version == same[1].version
    assert len({quotas.version for quotas in [*others, same[0]]}) == 5
    assert 0 not in {quotas.version for quotas in others}
