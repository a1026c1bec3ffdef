"""Who may ask what on a daemon's HTTP port.

A route says what it needs, an access control (`LocalAccess`) what a request has. Without credentials only this host is let in, and a
browser's page only if the daemon itself served it: a page of elsewhere could send requests to the loopback in its reader's name. With
credentials an operator's token is needed.
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
from kvstore.security.authenticator import Authenticator
from kvstore.security.config_file import signature
from kvstore.security.credentials import digest_of
from kvstore.security.identity import ANONYMOUS, UNAUTHENTICATED, Identity, IdentityKind

if TYPE_CHECKING:
    from aiohttp import web

SCHEME: Final = "bearer"
UNKNOWN: Final = "That token is not known"
EXPIRED: Final = "That token has expired; ask for a new one"
OWNERS: Final = {IdentityKind.TENANT: "a tenant", IdentityKind.NODE: "a node", IdentityKind.INSTANCE: "an engine"}
"""Kinds of tokens that open no console."""
Denied = Callable[[Actor, KVStoreError], None]
"""Told of a request whose token was refused, in the HTTP server's thread."""

log = logging.getLogger("kvstore.telemetry")


class AccessLevel(enum.IntEnum):
    """Each includes those before it."""

    NONE = 0
    """Health: whether the daemon lives and serves."""
    READ = 1
    """Metrics, and what `kvstore status` shows."""
    ADMIN = 2
    """Whatever changes something, and stacks and profiles, which show code and names."""


OWN_NAMES: Final = ("localhost",)


class LocalAccess:
    """Access control of a port without credentials: this host may do all. Others decide by credentials, and inherit from it.

    Methods are called in the HTTP server's thread; they neither block nor raise.
    """

    def allowed(self, request: "web.Request") -> AccessLevel:
        """Return what a request may do: ADMIN from the loopback, else NONE. A request by a foreign host name gets NONE as well: a page of
        that site, whose name was made to mean this host, could send it."""
        return AccessLevel.ADMIN if _is_loopback(request.remote or "") and _is_own(request.host) else AccessLevel.NONE

    def explain(self, request: "web.Request") -> str:
        """Return why the credential of a refused request is not enough; "" for a request without one."""
        return UNKNOWN if _bearer(request) is not None else ""

    def identify(self, request: "web.Request") -> Identity:
        """Return the identity of a request that was let in, for the audit trail."""
        return ANONYMOUS


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


class OperatorAccess(LocalAccess):
    """Access by the cluster's credentials: a token of [admins] may do all, every other request nothing, on this host too. The console shows
    what all tenants have, so a tenant's token is not enough. `denied` is called for each token that is refused."""

    def __init__(self, guard: Authenticator, denied: Denied = lambda _actor, _error: None) -> None:
        self._guard, self._denied = guard, denied

    def allowed(self, request: "web.Request") -> AccessLevel:
        if self._guard.allows_anonymous:
            return super().allowed(request)
        token = _bearer(request)
        if token is None:
            return AccessLevel.NONE
        try:
            identity = self._guard.identify("", token)
            if identity.is_admin:
                return AccessLevel.ADMIN
            raise NotAllowed(f"{kind_of(identity)} is no operator: the console and metrics need a token of [admins]")
        except KVStoreError as error:
            self._denied(Actor.of(UNAUTHENTICATED, peer=request.remote or "", via=HTTP), error)
            return AccessLevel.NONE

    def explain(self, request: "web.Request") -> str:
        """Only who has a token learns whose it is."""
        token = _bearer(request)
        owner = self._guard.owner(token) if token is not None else None
        if owner is None:
            return super().explain(request)
        return f"That token is {OWNERS[owner.kind]}'s; the console needs an operator's" if owner.kind in OWNERS else EXPIRED

    def identify(self, request: "web.Request") -> Identity:
        try:
            return self._guard.identify("", _bearer(request) or "")
        except KVStoreError:  # revoked in between
            return UNAUTHENTICATED


class TokenAccess(LocalAccess):
    """Access by any of some tokens: a request that shows one may do all, every other request nothing."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._digests = frozenset(map(digest_of, tokens))

    def allowed(self, request: "web.Request") -> AccessLevel:
        token = _bearer(request)
        # What is looked up is a digest: how long that takes tells nothing of a token.
        return AccessLevel.ADMIN if token is not None and digest_of(token) in self._digests else AccessLevel.NONE


class TokenFileAccess(TokenAccess):
    """Access by the tokens of a file, one a line, for a daemon that has no credentials of the cluster. The file is read again when it has
    changed. A file that has none any more changes nothing: who exchanges it is not to lock everybody out, nor to let anybody in."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError: the file cannot be read, or has no token."""
        self._path, self._read = path, signature(path)
        super().__init__(_tokens(path))

    def allowed(self, request: "web.Request") -> AccessLevel:
        now = signature(self._path)
        if now != self._read:
            self._read = now
            try:
                super().__init__(_tokens(self._path))
            except ConfigError as error:
                log.error("%s; the tokens of before are good until it has some", error)  # noqa: TRY400 - the text says all
        return super().allowed(request)


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


def _bearer(request: "web.Request") -> str | None:
    scheme, _space, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == SCHEME else None
