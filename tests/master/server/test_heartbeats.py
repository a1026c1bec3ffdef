"""Tests of heartbeats.py: nodes' reports over their connections."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.kvcache.namespace import Namespace
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import Heartbeat, HeartbeatResponse
from kvstore.protocol.errors import InvalidArgument, KVStoreError, ProtocolError, StaleEpoch, Unavailable, from_code
from kvstore.protocol.session_messages import Failure
from kvstore.testing.transfer.awaited import eventually
from kvstore.tiers.policies.prefix.reuse_hazard import BUCKETS
from kvstore.tiers.policies.prefix.visits import CLASSES
from kvstore.tiers.policies.reuse_statistics import ReuseStatistics
from tests.master.blocks import TENANT, Event
from tests.master.running import TIMEOUT_S, NodeSide, Places, master_in_thread


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with master_in_thread(tmp_path, node_ttl_s=60.0) as found:
        yield found


@pytest.fixture
def node(places: Places) -> Iterator[NodeSide]:
    side = NodeSide(places)
    yield side
    side.close()


def beat(node: NodeSide, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
    return said_raw(node, request.SerializeToString())


def said_raw(node: NodeSide, said: bytes) -> pb.HeartbeatReply:
    """Raises what the master answers."""
    header, body = node.ask(Heartbeat(said))
    if header.type == Failure.TYPE:
        failure = Failure.unpack(memoryview(body))
        raise from_code(failure.code, failure.text)
    return pb.HeartbeatReply.FromString(HeartbeatResponse.unpack(memoryview(body)).reply)


def of(node: NodeSide, **told: object) -> pb.HeartbeatRequest:
    registration = node.registration
    return pb.HeartbeatRequest(node_id=registration.node_id, registration_epoch=registration.registration_epoch, **told)  # type: ignore[arg-type]


def test_heartbeat_updates_status_and_returns_news(places: Places, node: NodeSide) -> None:
    tier = pb.TierStatus(name="dram", capacity_bytes=100, used_bytes=40, health="ok", hits=3)
    rate = pb.PeerRate(node_id=2, bytes_per_s=3e9, basis_bytes=9, age_s=1.0)
    told = {"tiers": [tier], "counters": {"gets": 7}, "rates": [rate], "links": [pb.LinkFlow(device="eth0", in_bytes=5)]}
    heard = beat(node, of(node, topology=b"topology", transfer=b"engine", **told))
    assert heard.master_epoch == node.registration.master_epoch
    assert heard.HasField("quotas"), "the node has none yet"
    assert not beat(node, of(node, quotas_version=heard.quotas.version)).HasField("quotas")
    with places.stub() as stub:
        (shown,) = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).nodes
        (described,) = stub.Topologies(pb.TopologiesRequest(), timeout=TIMEOUT_S)
    assert (list(shown.tiers), described.topology) == ([], b"topology"), "the last heartbeat told of no tiers"


def test_a_node_hears_which_namespaces_are_retired_once(places: Places, node: NodeSide) -> None:
    with places.stub() as stub:
        for version in ("", "v1"):
            revision = f"base@{version}" if version else "base"
            found = Namespace(model="m", revision=revision, dtype="bf16", block_tokens=16)
            form = pb.NamespaceForm(id=found.id, form=found.canonical())
            stub.ReportWeights(pb.WeightsReport(tenant="red", engine="e", base="base", namespaces=[form]), timeout=TIMEOUT_S)
    heard = beat(node, of(node))
    [retired] = heard.retired.tenants
    assert (retired.tenant, len(retired.namespaces)) == ("red", 1)
    assert not beat(node, of(node, retired_version=heard.retired.version)).HasField("retired")


def test_what_a_node_says_was_read_is_told_with_the_contents(places: Places, node: NodeSide) -> None:
    node.sync(Event(b"a", namespace="x"), Event(b"b", namespace="y"))
    beat(node, of(node, reads=[pb.NamespaceReads(tenant=TENANT, namespace="x", age_s=5.0)]))
    with places.stub() as stub:
        found = stub.Contents(pb.ContentsRequest(tenant=TENANT), timeout=TIMEOUT_S).namespaces
    ages = {one.namespace: one.read_age_s if one.HasField("read_age_s") else None for one in found}
    assert ages["y"] is None
    assert ages["x"] is not None
    assert 5 <= ages["x"] < 5 + TIMEOUT_S
    with pytest.raises(InvalidArgument, match="an age is finite"):
        beat(node, of(node, reads=[pb.NamespaceReads(age_s=-1.0)]))


def test_a_node_receives_what_the_policies_of_others_learned(places: Places, node: NodeSide) -> None:
    learned = ReuseStatistics(np.ones((CLASSES, BUCKETS)), np.ones((CLASSES, BUCKETS)), np.ones(2)).pack()
    report = pb.ReuseReport(tenants=[pb.TenantReuse(tenant="red", statistics=learned)])
    assert not beat(node, of(node)).HasField("reuse")
    assert not beat(node, of(node, reuse=report)).reuse.tenants, "there is no other node"
    other = NodeSide(places, name="two")
    try:
        report.tenants.add(tenant="blue", statistics=b"no statistics")
        assert beat(other, of(other, reuse=report)).reuse.tenants == report.tenants[:1]
    finally:
        other.close()
    with places.stub() as stub:
        counters = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).counters
        assert (counters["reuse_reports"], counters["reuse_refused"]) == (2, 1)
        eventually(lambda: not beat(node, of(node, reuse=report)).reuse.tenants, "the other node's report is dropped")


def test_a_heartbeat_is_of_the_node_whose_link_it_is(places: Places, node: NodeSide) -> None:
    other = NodeSide(places, name="two")
    try:
        with pytest.raises(StaleEpoch, match=r"a heartbeat of node 2 under registration .* was sent over the connection of node 1 under"):
            beat(node, of(other))
        beat(other, of(other))
    finally:
        other.close()


@pytest.mark.parametrize(
    ("said", "kind"),
    [(b"\xff", ProtocolError), (pb.HeartbeatRequest(node_id=1, registration_epoch=1).SerializeToString(), StaleEpoch)],
)
def test_invalid_heartbeat_is_refused_and_the_node_lives(node: NodeSide, said: bytes, kind: type[KVStoreError]) -> None:
    with pytest.raises(kind):
        said_raw(node, said)
    beat(node, of(node))


def test_what_cannot_be_is_refused_and_what_was_known_stays(places: Places, node: NodeSide) -> None:
    beat(node, of(node, rates=[pb.PeerRate(node_id=2, bytes_per_s=3e9, basis_bytes=9, age_s=1.0)]))
    with pytest.raises(InvalidArgument):
        beat(node, of(node, rates=[pb.PeerRate(node_id=2, bytes_per_s=-1, basis_bytes=9)]))
    with places.stub() as stub:
        (shown,) = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).nodes
    assert [rate.bytes_per_s for rate in shown.rates] == [3e9]


def test_a_node_that_counts_as_dead_is_told_to_register_again(places: Places, node: NodeSide) -> None:
    assert places.master is not None
    master = places.master
    directory = master.partitions[0].role_manager.leader().directory

    def dead() -> None:
        directory.disconnected(node.registration.node_id, node.registration.registration_epoch, master.reactor.now_ns())

    master.reactor.call(dead, deadline_s=TIMEOUT_S)
    with pytest.raises(StaleEpoch):
        beat(node, of(node))


def test_cut_off_master_refuses_heartbeats(places: Places, node: NodeSide) -> None:
    assert places.master is not None
    leader = places.master.partitions[0].role_manager.leader()
    places.master.reactor.call(lambda: leader.end(StaleEpoch("the lease ran out")), deadline_s=TIMEOUT_S)
    with pytest.raises(Unavailable, match="cut off from its catalog, which another one may own by now: the lease ran out"):
        beat(node, of(node))


def test_stopping_node_is_stopped_when_it_disconnects(places: Places, node: NodeSide) -> None:
    """Its last report stays."""
    tier = pb.TierStatus(name="dram", capacity_bytes=100)
    beat(node, of(node, tiers=[tier]))
    beat(node, of(node, stopped=True))
    node.close()
    with places.stub() as stub:
        eventually(lambda: stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).nodes[0].state == "stopped", "its link breaks")
        assert list(stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).nodes[0].tiers) == [tier]
    retry = NodeSide(places, instance=2)
    with places.stub() as stub:
        assert stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).nodes[0].state == "syncing"
    retry.close()
