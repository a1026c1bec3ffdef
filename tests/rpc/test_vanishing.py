"""Promises of vanishing.py on real sockets; between hosts, with a cut link: tests/system/test_vanished_hosts.py."""

import socket

import pytest

from kvstore.rpc.vanishing import MAX_PEER_TIMEOUT_S, MIN_PEER_TIMEOUT_S, PEER_TIMEOUT_S, notice_vanished_host


def told(sock: socket.socket) -> tuple[int, ...]:
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *(sock.getsockopt(socket.IPPROTO_TCP, name) for name in names)


@pytest.mark.parametrize(
    ("timeout_s", "idle_s", "interval_s"),
    [(MIN_PEER_TIMEOUT_S, 1, 1), (2.5, 1, 1), (PEER_TIMEOUT_S, 15, 3), (MAX_PEER_TIMEOUT_S, 1800, 450)],
)
def test_the_kernel_asks_an_idle_peer_so_that_it_is_given_up_in_its_time(timeout_s: float, idle_s: int, interval_s: int) -> None:
    with socket.socket() as sock:
        notice_vanished_host(sock, timeout_s, gives_up_unread=True)
        assert told(sock) == (1, idle_s, interval_s, 4, int(timeout_s * 1000))
    with socket.socket() as sock:
        notice_vanished_host(sock, timeout_s, gives_up_unread=False)
        assert told(sock) == (1, idle_s, interval_s, 4, 0)


def test_a_unix_socket_is_left_as_it_is() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        notice_vanished_host(sock, 1.0, gives_up_unread=True)
        assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
