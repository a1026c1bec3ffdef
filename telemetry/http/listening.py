"""The listening socket of an HTTP server: taken before anything else of a daemon is, and told to others."""

import socket
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.rpc.address import parse_address

BACKLOG: Final = 1024
WILDCARDS: Final = ("0.0.0.0", "::")
"""Hosts that mean all interfaces."""


def listening(listen: str) -> socket.socket:
    """A listening socket. The caller closes it. Raises ConfigError: nobody can listen there; InvalidArgument: no address."""
    address = parse_address(listen)
    if address.unix:
        raise ConfigError(f"cannot listen on {listen}: HTTP is served on HOST:PORT only")
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {listen}: {error.strerror or error}") from None


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
