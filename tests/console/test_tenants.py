"""Promises of tenants.py."""

import pytest

from kvstore.console.tenants import nearest
from kvstore.protocol import control_pb2 as pb

Told = list[tuple[str, str, str, float]]


def told(status: pb.StatusReply) -> Told:
    return [(one["tenant"], one["what"], one["at"], one["share"]) for one in nearest(status)]


def node(name: str, *uses: pb.TenantUse, state: str = "alive") -> pb.NodeStatus:
    return pb.NodeStatus(name=name, state=state, tenants=uses)


@pytest.mark.promise("observable")
def test_nearest_is_the_most_used_limit_and_its_node() -> None:
    quotas = pb.Quotas(default=pb.TenantQuota(blocks=10), tenants={"red": pb.TenantQuota(dram_bytes=100, blocks=1000, pins=4)})
    status = pb.StatusReply(
        quotas=quotas,
        nodes=[
            node("a", pb.TenantUse(tenant="red", dram_bytes=60, blocks=999), pb.TenantUse(tenant="blue", blocks=5)),
            node("b", pb.TenantUse(tenant="red", dram_bytes=70), pb.TenantUse(tenant="blue", blocks=4)),
            node("c", pb.TenantUse(tenant="red", dram_bytes=100), state="dead"),
        ],
    )
    assert told(status) == [("blue", "blocks", "a", 0.5), ("red", "blocks", "a", 0.999)]
    status.grants.add(tenant="red", pins=5)
    assert told(status) == [("blue", "blocks", "a", 0.5), ("red", "pins", "", 1.25)]


def test_nearest_covers_unused_and_zero_limits() -> None:
    status = pb.StatusReply(quotas=pb.Quotas(tenants={"red": pb.TenantQuota(pins=0), "blue": pb.TenantQuota(dram_slabs=5)}))
    assert told(status) == [("blue", "dram_slabs", "", 0.0), ("red", "pins", "", 0.0)]
    status.grants.add(tenant="red", pins=1)
    assert told(status)[1] == ("red", "pins", "", 1.0)
    status.nodes.append(node("a", pb.TenantUse(tenant="blue", dram_slabs=4)))
    assert told(status)[0] == ("blue", "dram_slabs", "a", 0.8)


def test_without_quotas_nothing_is_told() -> None:
    assert nearest(pb.StatusReply(nodes=[node("a", pb.TenantUse(tenant="red", blocks=5))])) == []
