"""Listening socket of an HTTP server, opened first at a daemon's start, and the address that is advertised."""

import errno
import socket
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.rpc.address import Address, listening_socket, parse_address

BACKLOG: Final = 1024
WILDCARDS: Final = ("0.0.0.0", "::")
"""Hosts that mean all interfaces."""


def listening(listen: str) -> socket.socket:
    """Open a listening socket; the caller closes it. Raises ConfigError if the address cannot be bound, InvalidArgument
    if malformed."""
    address = parse_address(listen)
    if address.unix:
        raise ConfigError(f"cannot listen on {listen}: HTTP is served on HOST:PORT only")
    try:
        return _listening_here(address)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {listen}: {getattr(error, 'strerror', None) or error}") from None


def _listening_here(address: Address) -> socket.socket:
    """Listen on the address; for the default 127.0.0.1 on a host without IPv4, on ::1."""
    try:
        return listening_socket(address.host, address.port, backlog=BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL or address.host != "127.0.0.1":
            raise
    return listening_socket("::1", address.port, backlog=BACKLOG)


def host_port(listener: socket.socket) -> str:
    """HOST:PORT of the socket."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reached_at(address: str, host: str) -> str:
    """HOST:PORT at which other hosts reach a server at `address`; with a wildcard address, `host` and its port. "" if
    unknown."""
    found = parse_address(address)
    if found.host not in WILDCARDS:
        return address
    return str(found._replace(host=host)) if host and host not in WILDCARDS else ""


def url_of(advertised: str) -> str:
    """URL of an advertised HTTP address, HOST:PORT or https://HOST:PORT."""
    return advertised if "://" in advertised else f"http://{advertised}"
