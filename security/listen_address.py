"""Where a daemon may listen: on the loopback, and elsewhere only if whoever comes has to show who he is, or the operator says aloud that
nobody has to."""

import ipaddress
import socket

from kvstore.protocol.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Is every address of this host name one that no other host reaches? True for a name without one: nothing listens there."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return True
    return all(ipaddress.ip_address(address[0]).is_loopback for _, _, _, _, address in found)


def check_listen_address(setting: str, host: str, *, is_authenticated: bool, allow_unauthenticated: bool, mend: str) -> None:
    """Raises ConfigError for a `host` that others reach, where whoever comes is not asked who he is. `setting` names it, `mend` says how
    this daemon is told to ask."""
    if is_authenticated or allow_unauthenticated or is_loopback(host):
        return
    raise ConfigError(
        f"{setting} is {host}, which other hosts reach, and whoever gets there would be let in: {mend} (docs/security.md), or say "
        "allow_unauthenticated if that network is yours alone"
    )
