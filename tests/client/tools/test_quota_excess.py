"""Promises of quota_excess.py."""

from kvstore.client.tools.quota_excess import excesses, is_known, known_tenants
from kvstore.protocol import control_pb2 as pb

RED = pb.TenantUse(tenant="red", dram_bytes=3 << 20, blocks=966, connections=9)
STATUS = pb.StatusReply(
    nodes=[
        pb.NodeStatus(name="b", state="alive", tenants=[RED]),
        pb.NodeStatus(name="a", state="dead", tenants=[RED]),
    ],
    grants=[pb.TenantGrants(tenant="green")],
    quotas=pb.Quotas(tenants={"blue": pb.TenantQuota()}),
)


def test_what_lies_above_a_new_limit_is_told_by_living_node() -> None:
    found = excesses(STATUS, "red", {"dram_bytes": 1 << 20, "blocks": 4, "nvme_bytes": None, "hbm_bytes": 0})
    assert [(one.at, one.what) for one in found] == [("b", "dram_bytes"), ("b", "blocks")]
    assert list(map(str, found)) == [
        "2 MiB of 3 MiB in 966 blocks lie above the new dram_bytes of 1 MiB, and will be evicted",
        "962 of 966 lie above the new blocks of 4, and will be evicted",
    ]


def test_a_limit_that_evicts_nothing_has_no_excess() -> None:
    assert excesses(STATUS, "red", {"connections": 1, "dram_bytes": 3 << 20}) == []
    assert excesses(STATUS, "blue", {"dram_bytes": 0}) == []


def test_tenants_are_known_by_what_they_hold_and_by_their_limits() -> None:
    assert known_tenants(STATUS) == ["blue", "green", "red"]
    assert [is_known(STATUS, name) for name in ("green", "purple")] == [True, False]
