"""Tests of master.py: several masters on one real etcd, over real sockets and gRPC. The daemon's own are in test_daemon.py."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from aetcd.rpc import rpc_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.master.catalogs.etcd.channel import EtcdAccess, EtcdChannel
from kvstore.master.config import MasterSettings
from kvstore.master.master import Master
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import SchedulerStub
from kvstore.protocol.errors import ConfigError, KVStoreError, ProtocolError, Unauthorized, Unavailable
from kvstore.protocol.master_messages import Exists, Pin
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, Flags, Hello, Welcome
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import eventually
from tests.credentials import tokens_file
from tests.etcd_server import EtcdServer
from tests.master.blocks import Event
from tests.master.running import TIMEOUT_S, NodeSide, Places, ask, master_in_thread

LEASE_TTL_S = 20.0
"""No lease ends for want of a processor, and one that was revoked is missed within a third of it."""
NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def pair(tmp_path: Path, etcd_url: str, request: pytest.FixtureRequest) -> Iterator[tuple[Places, Places]]:
    """An owner and a follower of a catalog of their own, whose prefix is the test's name."""
    settings = {"catalog": f"{etcd_url}/{request.node.name}", "node_ttl_s": 60.0, "lease_ttl_s": LEASE_TTL_S}
    with master_in_thread(tmp_path / "a", **settings) as owner, master_in_thread(tmp_path / "b", **settings) as follower:
        yield owner, follower


def status(places: Places) -> pb.StatusReply:
    with places.stub() as stub:
        reply: pb.StatusReply = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S)
        return reply


def health(places: Places, service: str = "kvstore.v1.Control") -> int:
    with grpc.insecure_channel(places.control) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        return int(check.status)


def depose(etcd: EtcdServer, prefix: str) -> None:
    """End the owner's lease."""
    channel = EtcdChannel([etcd.host_port], EtcdAccess())
    (owner,) = channel.call("Range", rpc_pb2.RangeRequest(key=f"/{prefix}/owner".encode()), timeout_s=TIMEOUT_S).kvs
    channel.call("LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=owner.lease), timeout_s=TIMEOUT_S)
    channel.close()


def is_hung_up_on(client: Channel) -> bool:
    try:
        ask(client, Exists([b"a"]), Flags)
    except Unavailable:
        return True
    return False


@pytest.mark.parametrize(
    "said", [{}, {"control": "[::]:0", "allow_unauthenticated": True}, {"advertise": "::1"}], ids=["listen", "reached", "advertise"]
)
def test_ipv6_master_advertises_its_control_plane(said: dict[str, Any], tmp_path: Path) -> None:
    """Of what it listens on, what the peer reached, and what it advertises."""
    with master_in_thread(tmp_path, **({"listen": "[::1]:0", "control": "[::1]:0"} | said)) as places:
        assert places.control.startswith("[::")
        welcome = places.client_welcome()
        assert welcome.control.startswith("[::1]:")
        assert status(Places(places.listen, places.unix, welcome.control)).name


@pytest.mark.promise("failover")
def test_a_follower_names_the_owner_and_answers_nothing_else(pair: tuple[Places, Places]) -> None:
    owner, follower = pair
    assert (owner.client_welcome().owner, follower.client_welcome().owner) == ("", owner.listen)
    channel = follower.client()
    assert channel.welcome.epoch == 0
    with pytest.raises(Unavailable, match=f"this master stands by: ask {owner.listen}"):
        ask(channel, Exists([b"a"]), Flags)
    assert channel.call(Hello(ROLE_NODE, name="n"), Welcome, Deadline(TIMEOUT_S)).owner == owner.listen
    with pytest.raises(KVStoreError, match="unknown role 9"):
        channel.call(Hello(9), Welcome, Deadline(TIMEOUT_S))
    with pytest.raises(ProtocolError, match="values go to nodes"):
        channel.call(Hello(ROLE_CLIENT, "red"), Welcome, Deadline(TIMEOUT_S), payload=[memoryview(b"v")])
    channel.close()


@pytest.mark.promise("failover")
def test_a_follower_tells_of_itself_and_serves_no_other_call(pair: tuple[Places, Places]) -> None:
    owner, follower = pair
    node = NodeSide(owner)
    node.sync(Event(b"a"), Event(b"b"))
    told = status(owner)
    assert (told.role, told.blocks, told.records, told.owner.address, told.owner.epoch) == ("owner", 2, 2, owner.listen, told.epoch)
    eventually(lambda: status(follower).records == 2, "the follower has the records")
    told = status(follower)
    assert (told.role, told.epoch, told.blocks, list(told.nodes)) == ("following", 0, 0, [])
    assert (told.owner.address, told.owner.name, told.owner.epoch) == (owner.listen, status(owner).name, status(owner).epoch)
    asked: list[Callable[[grpc.Channel], object]] = [
        lambda _channel: NodeSide(follower),
        lambda channel: SchedulerStub(channel).Instances(pb.InstancesRequest(), timeout=TIMEOUT_S),  # type: ignore[no-untyped-call]
    ]
    with follower.stub() as stub, grpc.insecure_channel(follower.control) as channel:
        asked.append(lambda _channel: stub.Forget(pb.ForgetRequest(node="n"), timeout=TIMEOUT_S))
        asked.append(lambda _channel: list(stub.ListKeys(pb.ListKeysRequest(tenant="red"), timeout=TIMEOUT_S)))
        asked.append(lambda _channel: list(stub.Topologies(pb.TopologiesRequest(), timeout=TIMEOUT_S)))
        for ask_it in asked:
            with pytest.raises(grpc.RpcError) as refused:
                ask_it(channel)
            assert (refused.value.code().name, refused.value.details()) == ("UNAVAILABLE", f"this master stands by: ask {owner.listen}")
    assert [health(owner), health(follower), health(follower, "kvstore.v1.Scheduler"), health(follower, "")] == [
        SERVING,
        NOT_SERVING,
        NOT_SERVING,
        SERVING,
    ]
    node.close()


@pytest.mark.promise("failover")
def test_follower_takes_over_without_loss(pair: tuple[Places, Places], etcd: EtcdServer, request: pytest.FixtureRequest) -> None:
    owner, follower = pair
    node, client = NodeSide(owner), owner.client()
    node.sync(Event(b"a"), Event(b"b"))
    node.publish(Event(b"c"))
    epoch = status(owner).epoch
    depose(etcd, request.node.name)
    eventually(lambda: max(status(owner).epoch, status(follower).epoch) > epoch, "one of them owns it again")
    eventually(lambda: is_hung_up_on(client), "the deposed one hangs up")
    client.close()
    node.close()
    newest = max(pair, key=lambda places: status(places).epoch)
    again, client = NodeSide(newest), newest.client()
    assert again.registration.node_id == 1
    assert ask(client, Exists([b"a", b"b", b"c", b"d"]), Flags).flags == b"\1\1\1\0"
    again.sync(Event(b"a"), Event(b"c"))
    assert ask(client, Exists([b"a", b"b", b"c"]), Flags).flags == b"\1\0\1"
    eventually(lambda: status(next(places for places in pair if places is not newest)).records == 2, "the other one follows")
    again.close()
    client.close()


@pytest.mark.promise("failover")
def test_an_owner_that_stops_is_followed_at_once(tmp_path: Path, etcd_url: str) -> None:
    """Its lease would last for ten minutes."""
    settings = {"catalog": f"{etcd_url}/handed-over", "lease_ttl_s": 600.0}
    with ExitStack() as stack:
        with master_in_thread(tmp_path / "a", **settings) as owner:
            follower = stack.enter_context(master_in_thread(tmp_path / "b", **settings))
            assert follower.client_welcome().owner == owner.listen
        eventually(lambda: status(follower).role == "owner", "the follower has it")


@pytest.mark.promise("failover")
def test_cut_off_owner_serves_reads_until_a_node_leaves(tmp_path: Path, etcd_server_factory: Callable[..., EtcdServer]) -> None:
    server = etcd_server_factory()
    with master_in_thread(tmp_path, catalog=f"etcd://{server.host_port}", node_ttl_s=60.0, lease_ttl_s=5.0) as places:
        node, client = NodeSide(places), places.client()
        node.sync(Event(b"a"))
        server.freeze()
        eventually(lambda: status(places).role == "cut off", "the lease is over")
        assert health(places) == NOT_SERVING
        assert (status(places).blocks, ask(client, Exists([b"a"]), Flags).flags) == (1, b"\1")
        with pytest.raises(Unavailable, match="cut off"):
            node.beat()
        with pytest.raises(TimeoutError):
            ask(client, Pin([b"a"]), Flags, 0.3)
        node.close()
        eventually(lambda: status(places).role == "following", "it stands by")
        client.close()
        with pytest.raises(Unavailable, match="no master owns the catalog now"):
            places.client()
        server.thaw()
        eventually(lambda: status(places).role == "owner", "it owns the catalog again")
        again, client = NodeSide(places), places.client()
        assert ask(client, Exists([b"a"]), Flags).flags == b"\1"
        again.close()
        client.close()


def test_a_follower_knows_tenants_by_their_tokens(tmp_path: Path, etcd_url: str) -> None:
    settings = {"catalog": f"{etcd_url}/tokens", "tokens": tokens_file(tmp_path), "lease_ttl_s": LEASE_TTL_S}
    with master_in_thread(tmp_path / "a", **settings) as owner, master_in_thread(tmp_path / "b", **settings) as follower:
        with pytest.raises(Unauthorized):
            follower.client(token="guess")
        client = follower.client(token="secret")
        assert client.welcome.owner == owner.listen
        client.close()


def test_instance_ttl_covers_two_reports(tmp_path: Path) -> None:
    with master_in_thread(tmp_path, report_interval_s=2.5, instance_ttl_s=5.0):
        pass
    with pytest.raises(ConfigError, match=r"instance_ttl_s is 5 and report_interval_s 2\.75"):
        Master(MasterSettings(report_interval_s=2.75, instance_ttl_s=5.0))
