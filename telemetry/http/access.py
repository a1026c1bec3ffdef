"""Who may ask what on a daemon's HTTP port.

A route says what it needs, an `Authorize` what a request has. Without credentials only this host is let in, and a browser's page only if
the daemon itself served it: a page of elsewhere could send requests to the loopback in its reader's name.
"""

import enum
import ipaddress
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kvstore.security.identity import EVERYBODY, Identity

if TYPE_CHECKING:
    from aiohttp import web  # who is let in is decided before any of it is loaded: see server.py


class Access(enum.IntEnum):
    """Each includes those before it."""

    NONE = 0
    """Health: whether the daemon lives and serves."""
    READ = 1
    """Metrics, and what `kvstore status` shows."""
    ADMIN = 2
    """Whatever changes something, and stacks and profiles, which show code and names."""


Authorize = Callable[["web.Request"], Access]
"""What a request may. Called in the HTTP server's thread; it may neither block nor raise."""
Explain = Callable[["web.Request"], str]
"""Why the credential of a request that was refused is not enough; "" for one without. As `Authorize` it neither blocks nor raises."""

Identify = Callable[["web.Request"], Identity]
"""The identity of a request that was let in, for the audit trail. Called in the HTTP server's thread."""
OWN_NAMES: Final = ("localhost",)


def this_host_only(request: "web.Request") -> Access:
    """ADMIN for a request from the loopback, NONE for all others, and for one to a name of elsewhere: a page of that site, whose name was
    made to mean this host, could send it."""
    return Access.ADMIN if _is_loopback(request.remote or "") and _is_own(request.host) else Access.NONE


def unexplained(_request: "web.Request") -> str:
    """The `Explain` of a port that asks for no credential."""
    return ""


def anybody(_request: "web.Request") -> Identity:
    """Of a daemon whose credentials have no names."""
    return EVERYBODY


def is_foreign(request: "web.Request") -> bool:
    """Whether a browser sends it for a page that this server has not served, by the Origin of the page."""
    origin = request.headers.get("Origin")
    return origin is not None and origin.partition("://")[2] != request.host


def _is_own(asked: str) -> bool:
    """Whether a Host is an address, or a name that means this host everywhere."""
    try:
        host = urlsplit(f"//{asked}").hostname or ""
    except ValueError:
        return False
    return _is_address(host) or host in OWN_NAMES


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
