"""Who may ask what on a daemon's HTTP port.

A route says what it needs, an `Authorize` what a request has. Without credentials only this host is let in, and a browser's page only if
the daemon itself served it: a page of elsewhere could send requests to the loopback in its reader's name. With credentials an operator's
token is needed.
"""

import enum
import ipaddress
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kvstore.protocol.errors import ConfigError, KVStoreError
from kvstore.protocol.errors import Denied as NotAllowed
from kvstore.security.actor import HTTP, Actor, kind_of
from kvstore.security.authenticator import Guard
from kvstore.security.config_file import signature
from kvstore.security.credentials import digest_of
from kvstore.security.identity import EVERYBODY, STRANGER, Identity, Kind

if TYPE_CHECKING:
    from aiohttp import web

SCHEME: Final = "bearer"
UNKNOWN: Final = "That token is not known"
EXPIRED: Final = "That token has expired; ask for a new one"
OWNERS: Final = {Kind.TENANT: "a tenant", Kind.NODE: "a node", Kind.INSTANCE: "an engine"}
"""Kinds of tokens that open no console."""
Denied = Callable[[Actor, KVStoreError], None]
"""Told of a request whose token was refused, in the HTTP server's thread."""

log = logging.getLogger("kvstore.telemetry")


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


def by_token(guard: Guard, denied: Denied = lambda _actor, _error: None) -> Authorize:
    """ADMIN for `Authorization: Bearer TOKEN` with a token of [admins]; NONE for all others, on this host too. The console shows what all
    tenants have, so a tenant's token is not enough. `denied` is called for each token that is refused."""

    def authorize(request: "web.Request") -> Access:
        if guard.lets_everybody_in:
            return this_host_only(request)
        token = _bearer(request)
        if token is None:
            return Access.NONE
        try:
            identity = guard.identify("", token)
            if identity.operates:
                return Access.ADMIN
            raise NotAllowed(f"{kind_of(identity)} is no operator: the console and metrics need a token of [admins]")
        except KVStoreError as error:
            denied(Actor.of(STRANGER, peer=request.remote or "", via=HTTP), error)
            return Access.NONE

    return authorize


def why_by_token(guard: Guard) -> Explain:
    """Why `by_token` refused a token. Only who has a token learns whose it is."""

    def explain(request: "web.Request") -> str:
        token = _bearer(request)
        owner = guard.owner(token) if token is not None else None
        if owner is None:
            return why_unknown(request)
        return f"That token is {OWNERS[owner.kind]}'s; the console needs an operator's" if owner.kind in OWNERS else EXPIRED

    return explain


def why_unknown(request: "web.Request") -> str:
    """Why `by_file` or `by_any_of` refused a token."""
    return UNKNOWN if _bearer(request) is not None else ""


def named_by_token(guard: Guard) -> Identify:
    """The operator whose token a request shows, which `by_token` let in; anybody, where there are no credentials."""

    def identify(request: "web.Request") -> Identity:
        try:
            return guard.identify("", _bearer(request) or "")
        except KVStoreError:  # revoked in between
            return STRANGER

    return identify


def by_file(path: str) -> Authorize:
    """As `by_token`, for a daemon that has no credentials of the cluster: with the tokens of the file at `path`, one a line, read again
    when it has changed. A file that has none any more changes nothing: who exchanges it is not to lock everybody out, nor to let anybody
    in. Raises ConfigError: it cannot be read, or has none."""
    read, authorize = signature(path), by_any_of(_tokens(path))

    def look_and_authorize(request: "web.Request") -> Access:
        nonlocal read, authorize
        now = signature(path)
        if now != read:
            read = now
            try:
                authorize = by_any_of(_tokens(path))
            except ConfigError as error:
                log.error("%s; the tokens of before are good until it has some", error)  # noqa: TRY400 - the text says all
        return authorize(request)

    return look_and_authorize


def _tokens(path: str) -> list[str]:
    """Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the tokens of the HTTP port in {path}: {error}") from None
    tokens = [line.strip() for line in lines if line.strip()]
    if not tokens:
        raise ConfigError(f"{path} has no token for the HTTP port: write one, or several, a line each")
    return tokens


def by_any_of(tokens: Iterable[str]) -> Authorize:
    """ADMIN for whoever shows one of these tokens, NONE for all others."""
    digests = frozenset(map(digest_of, tokens))

    def authorize(request: "web.Request") -> Access:
        token = _bearer(request)
        # What is looked up is a digest: how long that takes tells nothing of a token.
        return Access.ADMIN if token is not None and digest_of(token) in digests else Access.NONE

    return authorize


def _bearer(request: "web.Request") -> str | None:
    scheme, _space, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == SCHEME else None
