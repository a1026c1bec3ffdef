"""Tests of channel.py on real servers: endpoints, TLS, logins, and calls during a loss of the connection."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from aetcd.rpc import auth_pb2, rpc_pb2, rpc_pb2_grpc

from kvstore.master.catalogs.etcd.channel import EtcdAccess, EtcdChannel
from kvstore.protocol.errors import CatalogUnavailable, ConfigError
from tests.etcd_server import EtcdServer
from tests.ports import free_ports

EtcdServerFactory = Callable[..., EtcdServer]
OpenChannel = Callable[..., EtcdChannel]
TIMEOUT_S = 60.0
NOTHING_LISTENS_TIMEOUT_S = 0.5


@pytest.fixture
def channel() -> Iterator[OpenChannel]:
    """Channels that are closed when the test ends."""
    made: list[EtcdChannel] = []

    def channel(*endpoints: str, **access: Any) -> EtcdChannel:
        made.append(EtcdChannel(endpoints, EtcdAccess(**access)))
        return made[-1]

    yield channel
    for one in made:
        one.close()


@pytest.fixture
def guarded_etcd(etcd_server_factory: EtcdServerFactory) -> EtcdServer:
    """An etcd that asks for a login: user `root`, password `secret`."""
    server = etcd_server_factory()
    with grpc.insecure_channel(server.host_port) as admin:
        auth = rpc_pb2_grpc.AuthStub(admin)
        auth.UserAdd(rpc_pb2.AuthUserAddRequest(name="root", password="secret", options=auth_pb2.UserAddOptions()))
        auth.RoleAdd(rpc_pb2.AuthRoleAddRequest(name="root"))
        auth.UserGrantRole(rpc_pb2.AuthUserGrantRoleRequest(user="root", role="root"))
        auth.AuthEnable(rpc_pb2.AuthEnableRequest())
    return server


def forget_tokens(etcd: EtcdServer) -> None:
    """Turning authentication off and on again throws every token away."""
    with grpc.insecure_channel(etcd.host_port) as admin:
        auth = rpc_pb2_grpc.AuthStub(admin)
        token = auth.Authenticate(rpc_pb2.AuthenticateRequest(name="root", password="secret")).token
        auth.AuthDisable(rpc_pb2.AuthDisableRequest(), metadata=(("token", token),))
        auth.AuthEnable(rpc_pb2.AuthEnableRequest())


def read(channel: EtcdChannel, *, timeout_s: float = TIMEOUT_S) -> Any:
    return channel.call("Range", rpc_pb2.RangeRequest(key=b"anything"), timeout_s=timeout_s)


def unused_endpoint() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def test_channel_tries_endpoints_in_a_cycle(channel: OpenChannel, etcd: EtcdServer) -> None:
    several = channel(unused_endpoint(), etcd.host_port, unused_endpoint())
    with pytest.raises(CatalogUnavailable, match="etcd unreachable: 127"):
        read(several, timeout_s=NOTHING_LISTENS_TIMEOUT_S)
    assert read(several).header.revision > 0
    assert read(several).header.revision > 0


def test_lost_connection_fails_all_calls_then_reconnects(channel: OpenChannel, etcd_server_factory: EtcdServerFactory) -> None:
    server = etcd_server_factory()
    shared = channel(server.host_port)
    read(shared)
    server.freeze()
    replies = [shared.start("Range", rpc_pb2.RangeRequest(key=b"a"), timeout_s=TIMEOUT_S) for _call in range(3)]
    server.kill()
    for reply in replies:
        with pytest.raises(CatalogUnavailable, match="etcd unreachable"):
            reply.result()
    server.start()
    assert read(shared).header.revision > 0


def test_a_call_past_its_deadline_is_unavailable(channel: OpenChannel, etcd_server_factory: EtcdServerFactory) -> None:
    server = etcd_server_factory()
    server.freeze()
    with pytest.raises(CatalogUnavailable, match="etcd unreachable"):
        read(channel(server.host_port), timeout_s=0.2)


def test_close_cancels_calls_under_way_and_refuses_later_ones(channel: OpenChannel, etcd_server_factory: EtcdServerFactory) -> None:
    server = etcd_server_factory()
    closing = channel(server.host_port)
    read(closing)
    server.freeze()
    reply = closing.start("Range", rpc_pb2.RangeRequest(key=b"a"), timeout_s=60)
    closing.close()
    with pytest.raises(CatalogUnavailable):
        reply.result()
    with pytest.raises(CatalogUnavailable, match="was closed"):
        read(closing)
    closing.close()


def test_what_a_retry_cannot_mend_is_a_config_error(channel: OpenChannel, etcd: EtcdServer) -> None:
    with pytest.raises(ConfigError, match="INVALID_ARGUMENT"):
        channel(etcd.host_port).call("Range", rpc_pb2.RangeRequest(), timeout_s=TIMEOUT_S)


def test_login_is_renewed_when_the_token_is_forgotten(channel: OpenChannel, guarded_etcd: EtcdServer) -> None:
    known = channel(guarded_etcd.host_port, user="root", password="secret")
    read(known)
    forget_tokens(guarded_etcd)
    with pytest.raises(CatalogUnavailable, match="invalid auth token"):
        read(known)
    read(known)


def test_a_wrong_password_is_a_config_error(channel: OpenChannel, guarded_etcd: EtcdServer) -> None:
    with pytest.raises(ConfigError, match="authentication failed"):
        read(channel(guarded_etcd.host_port, user="root", password="wrong"))


def test_no_login_where_one_is_asked_for_is_a_config_error(channel: OpenChannel, guarded_etcd: EtcdServer) -> None:
    with pytest.raises(ConfigError, match="user name is empty"):
        read(channel(guarded_etcd.host_port))


def test_tls_with_authority_and_client_certificate_works(channel: OpenChannel, etcd_server_factory: EtcdServerFactory) -> None:
    server = etcd_server_factory(tls=True)
    cert, key = server.certificate
    assert read(channel(server.host_port, ca=cert, cert=cert, key=key)).header.revision > 0


def test_tls_without_the_client_certificate_fails(channel: OpenChannel, etcd_server_factory: EtcdServerFactory) -> None:
    server = etcd_server_factory(tls=True)
    with pytest.raises(CatalogUnavailable):
        read(channel(server.host_port, ca=server.certificate[0]))


def test_tls_with_another_authority_is_not_answered(channel: OpenChannel, etcd_server_factory: EtcdServerFactory) -> None:
    server, other = etcd_server_factory(tls=True), etcd_server_factory(tls=True)
    cert, key = server.certificate
    with pytest.raises(CatalogUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        read(channel(server.host_port, ca=other.certificate[0], cert=cert, key=key))


def test_unreadable_file_is_a_config_error_with_its_name(channel: OpenChannel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.pem: No such file"):
        channel("127.0.0.1:1", ca=tmp_path / "absent.pem")


@pytest.mark.parametrize(
    ("half", "said"),
    [
        ({"ca": Path("a"), "cert": Path("c")}, "both cert and key"),
        ({"ca": Path("a"), "key": Path("k")}, "both cert and key"),
        ({"cert": Path("c"), "key": Path("k")}, "needs ca"),
        ({"user": "u"}, "both a user and a password"),
        ({"password": "p"}, "both a user and a password"),
    ],
)
def test_half_an_access_is_a_config_error(half: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EtcdAccess(**half)
