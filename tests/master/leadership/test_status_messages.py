"""Tests of status_messages.py."""

import pytest

from kvstore.master.leadership.status_messages import as_seen_by
from kvstore.protocol import control_pb2 as pb
from kvstore.security.identity import ANONYMOUS, Identity, IdentityKind, Role

NODE = pb.NodeStatus(
    name="n",
    node_id=1,
    tcp="t:1",
    state="alive",
    heartbeat_age_s=0.5,
    blocks=7,
    tiers=[pb.TierStatus(name="dram", used_bytes=9)],
    counters={"gets": 3},
)
WHOLE = pb.StatusReply(
    version="1",
    epoch=3,
    catalog="etcd://secret-host",
    catalog_health="ok",
    blocks=7,
    reserved=2,
    pinned=1,
    rss_bytes=5,
    records=7,
    role="owner",
)
WHOLE.nodes.append(NODE)
WHOLE.owner.address = "m:1"
WHOLE.counters["keys"] = 12


@pytest.mark.parametrize(
    "identity", [ANONYMOUS, Identity(IdentityKind.OPERATOR, Role.ADMIN), Identity(IdentityKind.TENANT, Role.ADMIN, "red")]
)
def test_an_operator_sees_all(identity: Identity) -> None:
    assert as_seen_by(identity, WHOLE) == WHOLE


@pytest.mark.promise("least-privilege")
@pytest.mark.parametrize(
    "identity", [Identity(IdentityKind.TENANT, Role.WRITE, "red"), Identity(IdentityKind.NODE), Identity(IdentityKind.INSTANCE)]
)
def test_tenant_status_hides_other_tenants(identity: Identity) -> None:
    seen = as_seen_by(identity, WHOLE)
    node = pb.NodeStatus(name="n", node_id=1, tcp="t:1", state="alive", heartbeat_age_s=0.5)
    assert seen == pb.StatusReply(version="1", epoch=3, catalog_health="ok", role="owner", owner=WHOLE.owner, nodes=[node])
