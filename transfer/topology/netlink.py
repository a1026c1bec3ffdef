"""Network interfaces over netlink: their names, state and addresses, and change notifications.

The parsers are sans-I/O; `read_interfaces` and `open_changes` hold the sockets. Unlike /sys, which belongs to the
namespace that mounted it, netlink reports the caller's own network namespace. Source: linux/netlink.h,
linux/rtnetlink.h, linux/if_addr.h, linux/if_link.h.
"""

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvstore.protocol.errors import Broken

RTMGRP_LINK: Final = 0x1
RTMGRP_IPV4_IFADDR: Final = 0x10
RTMGRP_IPV6_IFADDR: Final = 0x100
RTM_NEWLINK: Final = 16
RTM_GETLINK: Final = 18
RTM_NEWADDR: Final = 20
RTM_GETADDR: Final = 22
NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
NLM_F_REQUEST_DUMP: Final = 0x301
IFLA_IFNAME: Final = 3
IFA_ADDRESS: Final = 1
IFA_LOCAL: Final = 2
IFA_F_DADFAILED: Final = 0x08
IFA_F_TENTATIVE: Final = 0x40
RT_SCOPE_LINK: Final = 253
IFF_UP: Final = 0x1
IFF_RUNNING: Final = 0x40
IFF_LOWER_UP: Final = 0x10000
IFF_WORKING: Final = IFF_UP | IFF_RUNNING | IFF_LOWER_UP
"""Up, ready to send, and with a carrier. The kernel delays the announcement of a lost carrier, and the removal of
RUNNING, by up to 1 s.
"""

_HEADER: Final = struct.Struct("=IHHII")
"""Length, type, flags, sequence, port."""
_LINK: Final = struct.Struct("=BxHiII")
"""ifinfomsg: family, type, index, flags, change."""
_ADDRESS: Final = struct.Struct("=BBBBi")
"""ifaddrmsg: family, prefix length, flags, scope, index."""
_ATTRIBUTE: Final = struct.Struct("=HH")
_ANSWER_BYTES: Final = 64 << 10
"""The kernel sends at most 32 KiB per datagram of a dump."""
_ANSWER_TIMEOUT_S: Final = 2.0
"""The kernel replies at once; without a timeout a filter on netlink (seccomp, gVisor) could block the start."""


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface of this network namespace. `is_up`: it is set up and its link runs. IPv4 addresses come first."""

    index: int
    is_up: bool = True
    addresses: tuple[str, ...] = ()


Message = tuple[int, memoryview]
"""Type and body of a netlink message."""


def messages(datagram: bytes) -> Iterator[Message]:
    """Yield the messages of one datagram. An invalid length ends it."""
    view, at = memoryview(datagram), 0
    while at + _HEADER.size <= len(view):
        size, kind, _flags, _sequence, _port = _HEADER.unpack_from(view, at)
        if not _HEADER.size <= size <= len(view) - at:
            return
        yield kind, view[at + _HEADER.size : at + size]
        at += size + 3 & ~3


def attributes(body: memoryview) -> dict[int, bytes]:
    """Parse the rtattr list behind a message's fixed part."""
    found, at = {}, 0
    while at + _ATTRIBUTE.size <= len(body):
        size, kind = _ATTRIBUTE.unpack_from(body, at)
        if not _ATTRIBUTE.size <= size <= len(body) - at:
            break
        found[kind & 0x3FFF] = bytes(body[at + _ATTRIBUTE.size : at + size])  # mask the flags "nested" and "network byte order"
        at += size + 3 & ~3
    return found


def interfaces_of(links: list[Message], addresses: list[Message]) -> dict[str, Interface]:
    """Return interfaces by name, from the dumps of links and addresses, without link-local and not yet usable
    addresses.
    """
    names: dict[int, str] = {}
    found: dict[str, Interface] = {}
    for kind, body in links:
        if kind == RTM_NEWLINK and len(body) >= _LINK.size:
            _family, _type, index, flags, _change = _LINK.unpack_from(body)
            names[index] = name = attributes(body[_LINK.size :]).get(IFLA_IFNAME, b"").rstrip(b"\0").decode(errors="replace")
            found[name] = Interface(index, flags & IFF_WORKING == IFF_WORKING)
    for kind, body in addresses:
        if kind == RTM_NEWADDR and len(body) >= _ADDRESS.size:
            index, address = _address(body)
            if address and index in names:
                interface = found[names[index]]
                found[names[index]] = replace(interface, addresses=_v4_first((*interface.addresses, address)))
    return found


def _address(body: memoryview) -> tuple[int, str]:
    """Return (index of the interface, address); "" for an address that peers cannot use."""
    _family, _prefix, flags, scope, index = _ADDRESS.unpack_from(body)
    found = attributes(body[_ADDRESS.size :])
    packed = found.get(IFA_LOCAL) or found.get(IFA_ADDRESS, b"")  # on a point-to-point link IFA_ADDRESS is the peer's
    if scope == RT_SCOPE_LINK or flags & (IFA_F_TENTATIVE | IFA_F_DADFAILED) or len(packed) not in (4, 16):
        return index, ""
    return index, str(ipaddress.ip_address(packed))


def _v4_first(addresses: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(dict.fromkeys(addresses), key=lambda address: ":" in address))


def read_interfaces() -> Mapping[str, Interface]:
    """Return the current interfaces of this network namespace. Raises Broken if netlink is not permitted."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as sock:
            sock.settimeout(_ANSWER_TIMEOUT_S)
            return interfaces_of(_dump(sock, RTM_GETLINK), _dump(sock, RTM_GETADDR))
    except OSError as error:
        raise Broken(f"cannot read the network interfaces over netlink: {error.strerror or error}") from None


def _dump(sock: socket.socket, kind: int) -> list[Message]:
    sock.sendto(_HEADER.pack(_HEADER.size + _LINK.size, kind, NLM_F_REQUEST_DUMP, kind, 0) + bytes(_LINK.size), (0, 0))
    found: list[Message] = []
    while True:
        for message in messages(sock.recv(_ANSWER_BYTES)):
            if message[0] == NLMSG_DONE:
                return found
            if message[0] == NLMSG_ERROR:
                number = -struct.unpack_from("=i", message[1])[0]
                raise OSError(number, os.strerror(number))
            found.append(message)


def open_changes() -> socket.socket:
    """Return a non-blocking socket that becomes readable when a link or an address changes. Raises OSError."""
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    try:
        sock.bind((0, RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR))
    except BaseException:
        sock.close()
        raise
    return sock


def drain(sock: socket.socket) -> None:
    """Discard queued messages: only the fact of a change counts, which a full queue (ENOBUFS) shows too."""
    while True:
        try:
            sock.recv(_ANSWER_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
