"""Promises of keepalive.py on real sockets; between hosts, with a cut link: tests/system/test_vanished_hosts.py."""

import signal
import socket
from pathlib import Path

import grpc
import pytest

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import ControlStub
from kvstore.rpc.keepalive import MAX_PEER_TIMEOUT_S, MIN_PEER_TIMEOUT_S, PEER_TIMEOUT_S, enable_keepalive, grpc_options
from tests.store.daemons import master_flags, running


def told(sock: socket.socket) -> tuple[int, ...]:
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *(sock.getsockopt(socket.IPPROTO_TCP, name) for name in names)


@pytest.mark.parametrize(
    ("timeout_s", "idle_s", "interval_s"),
    [(MIN_PEER_TIMEOUT_S, 1, 1), (2.5, 1, 1), (PEER_TIMEOUT_S, 15, 3), (MAX_PEER_TIMEOUT_S, 1800, 450)],
)
def test_keepalive_options_end_an_idle_dead_peer_in_time(timeout_s: float, idle_s: int, interval_s: int) -> None:
    with socket.socket() as sock:
        enable_keepalive(sock, timeout_s, limit_unacknowledged=True)
        assert told(sock) == (1, idle_s, interval_s, 4, int(timeout_s * 1000))
    with socket.socket() as sock:
        enable_keepalive(sock, timeout_s, limit_unacknowledged=False)
        assert told(sock) == (1, idle_s, interval_s, 4, 0)


def test_a_unix_socket_is_left_as_it_is() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        enable_keepalive(sock, 1.0, limit_unacknowledged=True)
        assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.promise("peers-vanish")
def test_grpc_call_to_a_silent_peer_ends_before_its_deadline(tmp_path: Path) -> None:
    with running("master", *master_flags(tmp_path), log=tmp_path / "master.log") as master:
        with grpc.insecure_channel(master.facts["control"], options=grpc_options(1.0)) as channel:
            stub = ControlStub(channel)  # type: ignore[no-untyped-call]
            stub.Status(pb.StatusRequest(), timeout=60)
            master.process.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.RpcError) as raised:
                stub.Status(pb.StatusRequest(), timeout=30)
            master.process.send_signal(signal.SIGCONT)
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
