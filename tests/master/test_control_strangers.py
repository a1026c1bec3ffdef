"""Promises of control_strangers.py, with sockets of this process; with gRPC's: test_control_service.py."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from kvstore.master import control_strangers
from kvstore.master.control_strangers import ControlStrangers

TIMEOUT_S = 30.0


class Port:
    """A port with connections whose both ends are here."""

    def __init__(self, host: str, opened: contextlib.ExitStack) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = opened.enter_context(socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::"))
        self._opened = opened
        self.number: int = self._listener.getsockname()[1]

    def reached(self, host: str = "127.0.0.1") -> socket.socket:
        """The caller's end."""
        near = self._opened.enter_context(socket.create_connection((host, self.number), TIMEOUT_S))
        self._opened.enter_context(self._listener.accept()[0])
        return near


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def told(sock: socket.socket) -> str:
    """As gRPC tells of a caller."""
    host, port = sock.getsockname()[:2]
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def is_open(sock: socket.socket) -> bool:
    sock.settimeout(0.0)
    try:
        return bool(sock.recv(1))
    except BlockingIOError:
        return True


@pytest.mark.parametrize(("listens", "reaches"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"), ("::", "::1")])
def test_of_strangers_who_are_too_many_those_who_have_been_here_longest_go(
    listens: str, reaches: str, opened: contextlib.ExitStack
) -> None:
    port = Port(listens, opened)
    strangers = ControlStrangers(port.number, most=2, max_connections=8)
    known = port.reached(reaches)
    strangers.met(told(known))
    assert strangers.look() == 0
    first = port.reached(reaches)
    assert strangers.look() == 0
    second = port.reached(reaches)
    assert strangers.look() == 0
    others = [port.reached(reaches) for _ in range(2)]
    assert strangers.look() == 2
    assert [is_open(sock) for sock in (known, first, second, *others)] == [True, False, False, True, True]
    first.close()
    second.close()
    strangers.met(told(others[0]))
    port.reached(reaches)
    assert strangers.look() == 0
    assert all(is_open(sock) for sock in (known, *others))


def test_connections_of_other_ports_and_sockets_of_other_kinds_are_nobodys_business(opened: contextlib.ExitStack) -> None:
    port, other = Port("127.0.0.1", opened), Port("127.0.0.1", opened)
    near, far = socket.socketpair()
    opened.enter_context(near)
    opened.enter_context(far)
    theirs = [other.reached() for _ in range(4)]
    ControlStrangers(port.number, most=1, max_connections=8).met("unix:/run/kvstore/master.sock")
    assert ControlStrangers(port.number, most=1, max_connections=8).look() == 0
    assert all(is_open(sock) for sock in (near, far, *theirs))


def test_where_there_are_few_descriptors_nobody_is_looked_at(opened: contextlib.ExitStack) -> None:
    port = Port("127.0.0.1", opened)
    port.reached()
    strangers = ControlStrangers(port.number, most=1 << 20, max_connections=1 << 21)
    assert strangers.look() == 0
    assert not strangers._seen


def test_who_called_longest_ago_is_forgotten_beyond_twice_the_connections(opened: contextlib.ExitStack) -> None:
    port = Port("127.0.0.1", opened)
    strangers = ControlStrangers(port.number, most=1, max_connections=1)
    callers = [port.reached() for _ in range(3)]
    for caller in (callers[0], callers[1], callers[0], callers[2]):
        strangers.met(told(caller))
    port.reached()
    assert strangers.look() == 1
    assert [is_open(caller) for caller in callers] == [True, False, True]


def test_a_descriptor_that_is_another_sockets_by_now_is_left_alone(opened: contextlib.ExitStack) -> None:
    port = Port("127.0.0.1", opened)
    near = port.reached()
    before = len(os.listdir("/proc/self/fd"))
    control_strangers._shut_down(near.fileno(), os.fstat(near.fileno()).st_ino + 1)
    assert is_open(near)
    assert len(os.listdir("/proc/self/fd")) == before
    assert control_strangers._sockets([near.fileno(), 1 << 20]) == {os.fstat(near.fileno()).st_ino: near.fileno()}
