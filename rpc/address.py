"""Addresses of daemons (`host:port`, or `unix:/path` for a socket file of this host), and connecting to them."""

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
from kvstore.rpc.unix_socket import denied_reason

if TYPE_CHECKING:
    from kvstore.rpc.reactor import Reactor
    from kvstore.security.tls.certificates import Certificates

NOT_LOCAL: Final = "it is on another host, or has no Unix socket"
MIN_SHARE_S: Final = 0.001
"""Shortest time for one address: a timeout of 0 would make the socket non-blocking."""
ResolvedAddresses = list[tuple[int, Any]]
"""(family, socket address) pairs, the preferred first; at least one."""


class Address(NamedTuple):
    """Listen address of a daemon: a Unix socket's path, or a host and port.

    A tuple because pools hash it for every request.
    """

    host: str = ""
    port: int = 0
    unix: str = ""
    partition: int = 0
    """Of a master: the partition of the connection."""

    def __str__(self) -> str:
        if self.unix:
            return f"unix:{self.unix}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse `host:port`, `[v6]:port` or `unix:/path`. Raises InvalidArgument with the expected form."""
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
    """Return this host's boot id: equal in two processes if and only if they share a kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def network_id() -> str:
    """Return the id of this process's network namespace: equal in two processes if and only if they share a loopback
    interface.

    Containers of one host share its boot id, but usually not the namespace.
    """
    return f"{host_id()}/{os.stat('/proc/self/ns/net').st_ino}"


def socket_id(unix: str) -> str:
    """Return the id of a Unix socket file: boot id, device and inode. Raises OSError.

    Containers share a boot id, and the same path may be another daemon's socket in each; so path and boot id do not
    suffice.
    """
    found = os.stat(unix)
    return f"{host_id()}/{found.st_dev}:{found.st_ino}"


def is_local_socket(unix: str, expected_id: str) -> bool:
    """Return True if this process sees `unix` as the socket file with this `socket_id` and may connect to it."""
    return not local_socket_problem(unix, expected_id)


def local_socket_problem(unix: str, expected_id: str) -> str:
    """Return why this process cannot reach the Unix socket `unix` with this `socket_id`; "" if it can.

    NOT_LOCAL needs no action; every other text has a remedy.
    """
    if not unix or expected_id.partition("/")[0] != host_id():
        return NOT_LOCAL
    try:
        found = socket_id(unix)
    except PermissionError:
        return denied_reason(Path(unix))
    except (OSError, ValueError):  # missing, or not a valid path
        return f"there is no {unix} in this mount namespace: mount its folder at that path"
    if found != expected_id:
        return f"{unix} is another daemon's socket in this mount namespace: mount the intended daemon's folder at that path"
    return "" if os.access(unix, os.W_OK, effective_ids=True) else denied_reason(Path(unix))


def listening_socket(host: str, port: int, *, backlog: int) -> socket.socket:
    """Return a listening TCP socket for a host name or address.

    `::` is every interface, of IPv6 and IPv4 if the system has both.

    Raises OSError, ValueError (UnicodeError: not a host name).
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    is_dual = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=backlog, dualstack_ipv6=is_dual)


def connect(address: Address, *, timeout_s: float, source: str = "") -> socket.socket:
    """Return a connected blocking socket, over TCP from the local address `source` if one is given.

    Raises OSError (or TimeoutError).

    `timeout_s` covers all addresses of a host together, but not the resolution of its name.
    """
    if address.unix:
        return _connect_one(socket.AF_UNIX, address.unix, timeout_s, "")
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise invalid_host_name(error) from None
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
    """Return the time for the next of a host's addresses: an equal share of what is left."""
    return max(left_s / addresses_left, MIN_SHARE_S)


def invalid_host_name(error: UnicodeError) -> OSError:
    """Return the idna codec's error for a label of over 63 characters as an OSError."""
    return OSError(errno.EINVAL, f"not a host name: {error}")


def connect_to(address: Address, tls: "Certificates | None", deadline: Deadline) -> socket.socket:
    """Return a connected blocking socket; over TCP with a `tls` for connecting, after the handshake.

    Raises Unavailable, DeadlineExceeded, Untrusted.
    """
    try:
        sock = connect(address, timeout_s=deadline.left_s())
        if tls is not None and tls.connects and not address.unix:
            return tls.connect(sock, address.host, deadline.left_s())
    except KVStoreError:
        raise
    except TimeoutError:
        raise deadline.exceeded() from None
    except OSError as error:
        raise connect_error(address, error) from None
    return sock


def connect_error(address: Address, error: OSError) -> Unavailable:
    """Return the typed error of a failed connect: TooManyConnections if this process is out of descriptors, else
    Unavailable.
    """
    kind = TooManyConnections if error.errno in (errno.EMFILE, errno.ENFILE) else Unavailable
    return kind(f"cannot connect to {address}: {error.strerror or error}")


def resolve(reactor: "Reactor", address: Address, on_found: Callable[[ResolvedAddresses | OSError], None]) -> None:
    """Resolve a host and call `on_found` once, in the loop; call this from the loop's thread.

    An IP address is resolved at once, a name by the system's resolver in a thread. `on_found` is not called after the
    reactor is closed.
    """
    try:
        on_found(_look_up(address, socket.AI_NUMERICHOST))
    except (socket.gaierror, UnicodeError):
        threading.Thread(target=_resolve_in_thread, args=(reactor, address, on_found), name="resolve", daemon=True).start()


def _resolve_in_thread(reactor: "Reactor", address: Address, on_found: Callable[[ResolvedAddresses | OSError], None]) -> None:
    found: ResolvedAddresses | OSError
    try:
        found = _look_up(address, 0)
    except UnicodeError as error:
        found = invalid_host_name(error)
    except OSError as error:
        found = error
    reactor.call_soon(lambda: on_found(found))


def _look_up(address: Address, flags: int) -> ResolvedAddresses:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, name) for family, _, _, _, name in found]
