"""Tests of control_service.py, over real gRPC."""

import contextlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.master import control_service
from kvstore.master.control_service import LIST_ROWS
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import ControlStub
from kvstore.protocol.errors import InvalidArgument, StaleEpoch
from kvstore.rpc.address import parse_address
from kvstore.security.grpc_metadata import as_metadata
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.config import ServerTlsSettings
from kvstore.security.tls.grpc_credentials import open_channel
from tests.credentials import OPERATOR, tokens_file
from tests.master.blocks import TENANT, Event
from tests.master.running import TIMEOUT_S, NodeSide, Places, master_in_thread
from tests.security.tls.certified import shared


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with master_in_thread(tmp_path, node_ttl_s=60.0) as found:
        yield found


@pytest.fixture
def node(places: Places) -> Iterator[NodeSide]:
    side = NodeSide(places)
    yield side
    side.close()


def listed(places: Places, *, token: str = "", **request: object) -> list[bytes]:
    with places.stub() as stub:
        asked = pb.ListKeysRequest(tenant="red", **request)  # type: ignore[arg-type]
        replies = stub.ListKeys(asked, timeout=TIMEOUT_S, metadata=as_metadata("red", token) if token else ())
        return [key for reply in replies for key in reply.keys]


def test_measured_rates_are_shown_and_invalid_ones_refused(places: Places, node: NodeSide) -> None:
    with places.stub() as stub:
        rate = pb.PeerRate(node_id=2, bytes_per_s=3e9, basis_bytes=9, age_s=1.0)
        node.beat(rates=[rate])
        (shown,) = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).nodes[0].rates
        assert (shown.node_id, shown.bytes_per_s, shown.basis_bytes) == (2, 3e9, 9)
        assert 1 <= shown.age_s < 1 + TIMEOUT_S
        rate.bytes_per_s = -1
        with pytest.raises(InvalidArgument):
            node.beat(rates=[rate])
        (found,) = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).nodes
        assert (found.state, found.rates[0].bytes_per_s) == ("syncing", 3e9)
        node.beat()
        assert not stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).nodes[0].rates


def topologies(places: Places, node: str = "") -> list[tuple[str, str, bytes]]:
    with places.stub() as stub:
        return [(each.name, each.state, each.topology) for each in stub.Topologies(pb.TopologiesRequest(node=node), timeout=TIMEOUT_S)]


@pytest.mark.parametrize("kind", ["lmdb", "etcd"])
def test_topologies_survive_a_restart(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    catalog = f"lmdb:{tmp_path / 'catalog'}" if kind == "lmdb" else f"{request.getfixturevalue('etcd_url')}/topologies"
    large = bytes(200_000)
    with master_in_thread(tmp_path / "one", catalog=catalog, node_ttl_s=60.0) as places, places.stub() as stub:
        stub.Register(pb.RegisterRequest(name="a", instance=1, topology=b"first"), timeout=TIMEOUT_S)
        node = NodeSide(places, "b")
        node.beat(topology=b"other")
        assert topologies(places) == [("a", "syncing", b"first"), ("b", "syncing", b"other")]
        node.beat()
        assert topologies(places, "b") == [("b", "syncing", b"other")], "a heartbeat that says nothing of it changes nothing"
        node.beat(topology=large)
        assert topologies(places, "b") == [("b", "syncing", large)]
        with pytest.raises(grpc.RpcError) as unknown:
            topologies(places, "c")
        assert unknown.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "there is no node 'c'; there are: a, b" in str(unknown.value.details())
        node.close()
    with master_in_thread(tmp_path / "two", catalog=catalog) as places:
        assert topologies(places) == [("a", "dead", b"first"), ("b", "dead", large)]


def test_errors_become_the_status_of_their_branch(places: Places, node: NodeSide) -> None:
    catalog = node.registration.catalog
    with places.stub() as stub:
        with pytest.raises(StaleEpoch):
            node.beat(registration_epoch=1)
        with pytest.raises(grpc.RpcError) as taken:
            stub.Register(pb.RegisterRequest(name="one", instance=2), timeout=TIMEOUT_S)
        with pytest.raises(grpc.RpcError) as former:
            stub.Register(
                pb.RegisterRequest(name="two", instance=2, seen_master_epoch=(1 << 64) - 1, seen_catalog=catalog), timeout=TIMEOUT_S
            )
        stub.Register(pb.RegisterRequest(name="two", instance=2, seen_master_epoch=(1 << 64) - 1, seen_catalog="other"), timeout=TIMEOUT_S)
    assert taken.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "a live node already has the name 'one'" in str(taken.value.details())
    assert former.value.code() == grpc.StatusCode.FAILED_PRECONDITION


def test_listing_of_longest_keys_fits_a_message(places: Places, node: NodeSide) -> None:
    count = LIST_ROWS * 2
    node.sync(*(Event(b"%0255d" % n, namespace="n" * 255) for n in range(count)))
    assert len(listed(places, any_namespace=True)) == count


def test_contents_without_authentication_have_all_tenants(places: Places, node: NodeSide) -> None:
    node.sync(Event(b"a", namespace="x"), Event(b"b", namespace="x", parent=b"a"), Event(b"c", tenant="blue"))
    with places.stub() as stub:
        found = stub.Contents(pb.ContentsRequest(tenant=TENANT, namespace="x", max_segments=10), timeout=TIMEOUT_S)
    assert [(one.tenant, one.namespace, one.stored.blocks) for one in found.namespaces] == [(TENANT, "x", 2), ("blue", "ns", 1)]
    assert [(one.key, one.stored.blocks) for one in found.segments] == [(b"a", 2)]


def test_health_and_reflection_are_served(places: Places) -> None:
    with grpc.insecure_channel(places.control) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "kvstore.v1.Control", "kvstore.v1.Scheduler"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]), timeout=TIMEOUT_S)
    assert {"kvstore.v1.Control", "kvstore.v1.Scheduler"} <= {service.name for service in answer.list_services_response.service}


def reached(places: Places) -> socket.socket:
    address = parse_address(places.control)
    return socket.create_connection((address.host, address.port), TIMEOUT_S)


def heard(sock: socket.socket) -> bytes:
    """Data sent before the end."""
    told = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(4096):
            told += part
    return told


@pytest.mark.promise("peers-vanish")
def test_silent_connection_ends_at_the_handshake_timeout(tmp_path: Path) -> None:
    with master_in_thread(tmp_path, hello_timeout_s=0.5) as places, reached(places) as silent:
        heard(silent)
        with places.stub() as stub:
            stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S)


@pytest.mark.promise("peers-vanish")
def test_connections_over_the_limit_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_service, "CONNECTIONS_CHECK_S", 3600.0)
    with (
        master_in_thread(tmp_path, max_connections=2, hello_timeout_s=3600.0) as places,
        reached(places) as first,
        reached(places) as second,
    ):
        assert first.recv(1)
        assert second.recv(1)
        with reached(places) as third:
            assert heard(third) == b""


@pytest.mark.promise("authentication")
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_unauthenticated_connections_leave_half_to_others(tmp_path: Path, *, is_encrypted: bool) -> None:
    """Those who were let in before keep theirs."""
    tls = shared().master() if is_encrypted else ServerTlsSettings()
    settings = {name: getattr(tls, name) for name in ("tls_ca", "tls_cert", "tls_key")}
    client = Certificates.of(shared().client()) if is_encrypted else None
    shown = as_metadata("", OPERATOR)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.min_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]
    with (
        master_in_thread(tmp_path / "run", tokens=tokens_file(tmp_path), max_connections=8, hello_timeout_s=3600.0, **settings) as places,
        open_channel(places.control, client, options) as before,
        open_channel(places.control, client, options) as after,
        ExitStack() as opened,
    ):

        def asks(channel: grpc.Channel) -> None:
            stub = ControlStub(channel)  # type: ignore[no-untyped-call]
            stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S, metadata=shown, wait_for_ready=True)

        left = list[grpc.ChannelConnectivity]()
        asks(before)
        before.subscribe(left.append)
        strangers = [opened.enter_context(reached(places)) for _ in range(12)]
        asks(after)
        heard(strangers[0])  # to its end: it has been here longest
        asks(before)
        assert set(left) <= {grpc.ChannelConnectivity.READY}
