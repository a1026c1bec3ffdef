"""Check of listen addresses: non-loopback ones require authentication, or an explicit setting."""

import ipaddress
import socket

from kvstore.protocol.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Return True if all addresses of this host name are loopback, or if the name has no address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return True
    return all(ipaddress.ip_address(address[0]).is_loopback for _, _, _, _, address in found)


def check_listen_address(setting: str, host: str, *, is_authenticated: bool, allow_unauthenticated: bool, mend: str) -> None:
    """Raises ConfigError for a non-loopback `host` without authentication.

    `setting`: its name; `mend`: how to authenticate peers.
    """
    if is_authenticated or allow_unauthenticated or is_loopback(host):
        return
    raise ConfigError(
        f"{setting} {host} is not loopback, and authentication is off: {mend} (docs/security.md), or set allow_unauthenticated on a "
        "trusted network"
    )
