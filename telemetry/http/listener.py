"""The listening socket of an HTTP server: taken before anything else of a daemon is, and told to others."""

import errno
import socket
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.rpc.address import Address, listening_socket, parse_address

BACKLOG: Final = 1024
WILDCARDS: Final = ("0.0.0.0", "::")
"""Hosts that mean all interfaces."""


def listening(listen: str) -> socket.socket:
    """A listening socket. The caller closes it. Raises ConfigError: nobody can listen there; InvalidArgument: no address."""
    address = parse_address(listen)
    if address.unix:
        raise ConfigError(f"cannot listen on {listen}: HTTP is served on HOST:PORT only")
    try:
        return _listening_here(address)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {listen}: {getattr(error, 'strerror', None) or error}") from None


def _listening_here(address: Address) -> socket.socket:
    """The default is 127.0.0.1, which a host without IPv4 does not have: there it is ::1."""
    try:
        return listening_socket(address.host, address.port, backlog=BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL or address.host != "127.0.0.1":
            raise
    return listening_socket("::1", address.port, backlog=BACKLOG)


def host_port(listener: socket.socket) -> str:
    """Where it listens."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reached_at(address: str, host: str) -> str:
    """HOST:PORT by which others reach a server that listens at `address`: on all interfaces, at `host`. "" where that is not known."""
    found = parse_address(address)
    if found.host not in WILDCARDS:
        return address
    return str(found._replace(host=host)) if host and host not in WILDCARDS else ""


def url_of(told: str) -> str:
    """Of what a daemon tells of its HTTP port: HOST:PORT, or https://HOST:PORT where it speaks that."""
    return told if "://" in told else f"http://{told}"
