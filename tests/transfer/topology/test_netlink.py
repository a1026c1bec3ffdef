"""Promises of netlink.py: the kernel's messages are parsed, on this machine and byte for byte."""

import select
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import Broken
from kvstore.transfer.topology import netlink
from kvstore.transfer.topology.netlink import (
    IFA_ADDRESS,
    IFA_F_TENTATIVE,
    IFA_LOCAL,
    IFF_LOWER_UP,
    IFF_RUNNING,
    IFF_UP,
    IFF_WORKING,
    IFLA_IFNAME,
    RT_SCOPE_LINK,
    RTM_NEWADDR,
    RTM_NEWLINK,
    Interface,
    Message,
    attributes,
    drain,
    interfaces_of,
    messages,
    open_changes,
    read_interfaces,
)

V4, V6 = bytes((10, 0, 0, 1)), socket.inet_pton(socket.AF_INET6, "fd00::1")
WITHOUT = {"set down": IFF_UP, "not running": IFF_RUNNING, "no carrier": IFF_LOWER_UP}


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def link(index: int, name: str, flags: int = IFF_WORKING) -> Message:
    return RTM_NEWLINK, memoryview(struct.pack("=BxHiII", 0, 1, index, flags, 0) + attribute(IFLA_IFNAME, name.encode() + b"\0"))


def address(index: int, value: bytes, *, kind: int = IFA_LOCAL, flags: int = 0, scope: int = 0) -> Message:
    return RTM_NEWADDR, memoryview(struct.pack("=BBBBi", 2, 24, flags, scope, index) + attribute(kind, value))


def test_interfaces_have_their_addresses_ipv4_first() -> None:
    addresses = [address(2, V6, kind=IFA_ADDRESS), address(2, V4), address(2, V4), address(3, V6)]
    assert interfaces_of([link(2, "eth0"), link(3, "eth1")], addresses) == {
        "eth0": Interface(2, True, ("10.0.0.1", "fd00::1")),
        "eth1": Interface(3, True, ("fd00::1",)),
    }


@pytest.mark.parametrize("flag", WITHOUT.values(), ids=WITHOUT.keys())
def test_an_interface_is_up_only_if_up_running_and_with_carrier(flag: int) -> None:
    assert interfaces_of([link(2, "eth0", IFF_WORKING & ~flag)], []) == {"eth0": Interface(2, False)}


@pytest.mark.parametrize(
    "message",
    [
        address(2, V6, scope=RT_SCOPE_LINK),
        address(2, V6, flags=IFA_F_TENTATIVE),
        address(2, b"short"),
        address(2, b""),
        address(9, V4),
        (RTM_NEWADDR, memoryview(b"short")),
        (RTM_NEWLINK, memoryview(bytes(40))),
    ],
    ids=["link-local", "tentative", "odd size", "empty", "of no interface", "cut", "another kind"],
)
def test_what_peers_cannot_use_is_left_out(message: Message) -> None:
    assert interfaces_of([link(2, "eth0"), (RTM_NEWLINK, memoryview(b"cut")), (99, memoryview(b""))], [message]) == {"eth0": Interface(2)}


def test_messages_end_at_an_invalid_length() -> None:
    def message(kind: int, body: bytes, size: int | None = None) -> bytes:
        return struct.pack("=IHHII", 16 + len(body) if size is None else size, kind, 0, 0, 0) + body + bytes(-len(body) % 4)

    whole = message(7, b"abc") + message(8, b"")
    assert [(kind, bytes(body)) for kind, body in messages(whole)] == [(7, b"abc"), (8, b"")]
    for size in (15, 21):
        assert list(messages(message(7, b"abcd", size))) == []
    assert attributes(memoryview(attribute(5, b"x") + struct.pack("=HH", 3, 6))) == {5: b"x"}


@given(st.binary(max_size=200))
def test_any_bytes_are_read_without_an_error(garbage: bytes) -> None:
    found = list(messages(garbage))
    interfaces_of(found, found)
    interfaces_of([link(2, "eth0"), (RTM_NEWLINK, memoryview(garbage))], [(RTM_NEWADDR, memoryview(garbage))])


def test_a_kernel_that_refuses_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlink, "RTM_GETADDR", 9999)  # a request that no kernel knows
    with pytest.raises(Broken, match=r"cannot read the network interfaces over netlink: .+not supported"):
        read_interfaces()


def test_draining_empties_the_queue_even_one_that_overflowed() -> None:
    with open_changes() as sock:
        drain(sock)
        assert not select.select([sock], [], [], 0)[0]

    class Queue:
        """A socket whose kernel side overflowed: it says so once, between messages."""

        def __init__(self) -> None:
            self.answers: list[Exception | bytes] = [b"x", OSError(105, "No buffer space available"), b"y", BlockingIOError()]

        def recv(self, size: int) -> bytes:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    queue = Queue()
    drain(queue)  # type: ignore[arg-type]
    assert queue.answers == []
    queue.answers = [OSError(9, "Bad file descriptor")]
    with pytest.raises(OSError, match="Bad file"):
        drain(queue)  # type: ignore[arg-type]
