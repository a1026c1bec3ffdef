"""Addresses of daemons: `host:port` for TCP, `unix:/path` for a socket file of this host; and connecting to them."""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument, KVStoreError, TooManyConnections, Unavailable
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.unix_socket import why_denied

if TYPE_CHECKING:
    from kvstore.rpc.reactor import Reactor
    from kvstore.security.tls.certificates import Certificates

ELSEWHERE: Final = "it is on another host, or has no Unix socket"
MIN_SHARE_S: Final = 0.001
"""A timeout of 0 would mean not to wait at all."""
Found = list[tuple[int, Any]]
"""(family, the address as its sockets take it), the preferred first; at least one."""


class Address(NamedTuple):
    """Where a daemon listens: a Unix socket's path, or a host and port. A tuple because pools look it up for every request."""

    host: str = ""
    port: int = 0
    unix: str = ""
    partition: int = 0
    """Of a master: the part of the key space that it is asked about there. A connection is about one."""

    def __str__(self) -> str:
        if self.unix:
            return f"unix:{self.unix}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """`host:port`, `[v6]:port` or `unix:/path`. Raises InvalidArgument with the form expected."""
    if text.startswith("unix:"):
        if len(text) == 5:
            raise InvalidArgument("an address unix:PATH needs a path")
        return Address(unix=text[5:])
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if "/" in host or any(map(str.isspace, host)):
        raise InvalidArgument(f"{text!r} is not an address: write HOST:PORT, without a scheme or a path, or unix:PATH")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise InvalidArgument(f"{text!r} is not an address: write HOST:PORT (port 0 to 65535) or unix:PATH")
    return Address(host=host, port=int(port))


@cache
def host_id() -> str:
    """This host's boot id: equal in two processes exactly when they share a kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def network_id() -> str:
    """This process's network: equal in two processes exactly when they have the same interfaces, the loopback among them.

    Containers of one host have its boot id and, each in a network namespace of its own, other interfaces.
    """
    return f"{host_id()}/{os.stat('/proc/self/ns/net').st_ino}"


def socket_id(unix: str) -> str:
    """What a daemon tells with the path of its Unix socket: the boot id, and the socket file's device and inode. Raises OSError.

    The path alone would not do: containers share a boot id, and a path that means one daemon in one of them may mean another's next door.
    """
    found = os.stat(unix)
    return f"{host_id()}/{found.st_dev}:{found.st_ino}"


def is_here(unix: str, told: str) -> bool:
    """Whether the path `unix` is, for this process, the very socket file whose `socket_id` was told, and one that it may connect to."""
    return not why_not_here(unix, told)


def why_not_here(unix: str, told: str) -> str:
    """Why the daemon that told this `socket_id` of its Unix socket `unix` is not reached through it from here; "" if it is. ELSEWHERE is
    nobody's fault; the other reasons say what to do."""
    if not unix or told.partition("/")[0] != host_id():
        return ELSEWHERE
    try:
        found = socket_id(unix)
    except PermissionError:
        return why_denied(Path(unix))
    except (OSError, ValueError):  # none of that name, or no name at all
        return f"there is no {unix} in this mount namespace: mount its folder at that path"
    if found != told:
        return f"{unix} is another daemon's in this mount namespace: mount the folder of the one that is meant"
    return "" if os.access(unix, os.W_OK, effective_ids=True) else why_denied(Path(unix))


def listening_socket(host: str, port: int, *, backlog: int) -> socket.socket:
    """A listening TCP socket at a host name or address. `::` is every interface of both families, where the system has IPv6 and IPv4.

    Raises OSError, ValueError (UnicodeError: no host name).
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    is_dual = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=backlog, dualstack_ipv6=is_dual)


def connect(address: Address, *, timeout_s: float, source: str = "") -> socket.socket:
    """A connected blocking socket, over TCP from the local address `source` if one is given. Raises OSError (TimeoutError among them).

    `timeout_s` is for all addresses of a host together, but not for the look-up of its name, which the system's resolver limits.
    """
    if address.unix:
        return _connect_one(socket.AF_UNIX, address.unix, timeout_s, "")
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise not_a_name(error) from None
    end_s = time.monotonic() + timeout_s
    for number, (family, _, _, _, name) in enumerate(found):
        try:
            sock = _connect_one(family, name, share_s(end_s - time.monotonic(), len(found) - number), source)
        except OSError:
            if number == len(found) - 1:
                raise
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    raise ConnectionError(0, "the host has no address")


def _connect_one(family: int, name: Any, timeout_s: float, source: str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        if source:
            sock.bind((source, 0))
        sock.connect(name)
    except BaseException:
        sock.close()
        raise
    return sock


def share_s(left_s: float, addresses_left: int) -> float:
    """Time for the next of a host's addresses: one that does not answer leaves the others theirs."""
    return max(left_s / addresses_left, MIN_SHARE_S)


def not_a_name(error: UnicodeError) -> OSError:
    """What the idna codec raises for a label of over 63 characters, as an OSError."""
    return OSError(errno.EINVAL, f"not a host name: {error}")


def connect_to(address: Address, tls: "Certificates | None", deadline: Deadline) -> socket.socket:
    """A connected blocking socket; over TCP, with `tls` that connects, after its handshake. Raises Unavailable, DeadlineExceeded,
    Untrusted."""
    try:
        sock = connect(address, timeout_s=deadline.left_s())
        if tls is not None and tls.connects and not address.unix:
            return tls.connect(sock, address.host, deadline.left_s())
    except KVStoreError:
        raise
    except TimeoutError:
        raise deadline.exceeded() from None
    except OSError as error:
        raise not_connected(address, error) from None
    return sock


def not_connected(address: Address, error: OSError) -> Unavailable:
    """The error of an attempt to connect that failed with `error`: TooManyConnections where this process is out of descriptors."""
    kind = TooManyConnections if error.errno in (errno.EMFILE, errno.ENFILE) else Unavailable
    return kind(f"cannot connect to {address}: {error.strerror or error}")


def resolve(reactor: "Reactor", address: Address, on_found: Callable[[Found | OSError], None]) -> None:
    """Call `on_found` once, in the loop: at once for an IP address, else after a thread has asked the system's resolver, which limits how
    long that takes. Not at all if the reactor is closed by then. For the loop's thread."""
    try:
        on_found(_look_up(address, socket.AI_NUMERICHOST))
    except (socket.gaierror, UnicodeError):
        threading.Thread(target=_ask, args=(reactor, address, on_found), name="resolve", daemon=True).start()


def _ask(reactor: "Reactor", address: Address, on_found: Callable[[Found | OSError], None]) -> None:
    found: Found | OSError
    try:
        found = _look_up(address, 0)
    except UnicodeError as error:
        found = not_a_name(error)
    except OSError as error:
        found = error
    reactor.call_soon(lambda: on_found(found))


def _look_up(address: Address, flags: int) -> Found:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, name) for family, _, _, _, name in found]
