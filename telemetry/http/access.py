"""Access control of a daemon's HTTP port.

A route has a required level; an access control (`LocalAccess`) gives each request a level. Without credentials only
this host has access, and a browser page only if this daemon served it: another site's page could send requests to the
loopback address. With credentials an operator's token is required.
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
"""Kinds of tokens without access to the console."""
Denied = Callable[[Actor, KVStoreError], None]
"""Called for each request with a refused token, in the HTTP server's thread."""

log = logging.getLogger("kvstore.telemetry")


class AccessLevel(enum.IntEnum):
    """Access levels; each includes those before it."""

    NONE = 0
    """Health checks."""
    READ = 1
    """Metrics, and the contents of `kvstore status`."""
    ADMIN = 2
    """Changes, and stacks and profiles, which show code and names."""


OWN_NAMES: Final = ("localhost",)


class LocalAccess:
    """Access control without credentials: this host has full access. Subclasses use credentials.

    Methods run in the HTTP server's thread; they neither block nor raise.
    """

    def allowed(self, request: "web.Request") -> AccessLevel:
        """Level of a request: ADMIN from the loopback address, else NONE. A foreign Host header gets NONE as well: a
        site's page could send it after rebinding its name to this host (DNS rebinding)."""
        return AccessLevel.ADMIN if _is_loopback(request.remote or "") and _is_own(request.host) else AccessLevel.NONE

    def explain(self, request: "web.Request") -> str:
        """Why the credential of a refused request is insufficient; "" without a credential."""
        return UNKNOWN if _bearer(request) is not None else ""

    def identify(self, request: "web.Request") -> Identity:
        """Identity of an accepted request, for the audit trail."""
        return ANONYMOUS


def is_foreign(request: "web.Request") -> bool:
    """Return whether a browser sends it from a page of another origin, by its Origin header."""
    origin = request.headers.get("Origin")
    return origin is not None and origin.partition("://")[2] != request.host


def _is_own(asked: str) -> bool:
    """Return whether a Host header is an address or a loopback name."""
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
    """Access by the cluster's credentials: a token of [admins] has full access, any other request none, on this host
    too.

    A tenant's token is refused, because the console shows data of all tenants. `denied` is called for each refused
    token.
    """

    def __init__(self, guard: Authenticator, denied: Denied = lambda _actor, _error: None) -> None:
        self._authenticator, self._denied = guard, denied

    def allowed(self, request: "web.Request") -> AccessLevel:
        if self._authenticator.allows_anonymous:
            return super().allowed(request)
        token = _bearer(request)
        if token is None:
            return AccessLevel.NONE
        try:
            identity = self._authenticator.identify("", token)
            if identity.is_admin:
                return AccessLevel.ADMIN
            raise NotAllowed(f"{kind_of(identity)} is no operator: the console and metrics need a token of [admins]")
        except KVStoreError as error:
            self._denied(Actor.of(UNAUTHENTICATED, peer=request.remote or "", via=HTTP), error)
            return AccessLevel.NONE

    def explain(self, request: "web.Request") -> str:
        """Only the holder of a token learns its owner."""
        token = _bearer(request)
        owner = self._authenticator.owner(token) if token is not None else None
        if owner is None:
            return super().explain(request)
        return f"That token is {OWNERS[owner.kind]}'s; the console needs an operator's" if owner.kind in OWNERS else EXPIRED

    def identify(self, request: "web.Request") -> Identity:
        try:
            return self._authenticator.identify("", _bearer(request) or "")
        except KVStoreError:  # revoked in between
            return UNAUTHENTICATED


class TokenAccess(LocalAccess):
    """Access by a set of tokens: a request with one has full access, any other none."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._digests = frozenset(map(digest_of, tokens))

    def allowed(self, request: "web.Request") -> AccessLevel:
        token = _bearer(request)
        # Comparing digests leaks nothing about tokens through timing.
        return AccessLevel.ADMIN if token is not None and digest_of(token) in self._digests else AccessLevel.NONE


class TokenFileAccess(TokenAccess):
    """Access by the tokens of a file, one per line, for daemons without the cluster's credentials.

    The file is reloaded after a change. A file without tokens is ignored, so that replacing it neither locks all out
    nor opens the port.
    """

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
                log.error("%s; the previous tokens stay valid until then", error)  # noqa: TRY400 - no traceback needed
        return super().allowed(request)


def _tokens(path: str) -> list[str]:
    """Read the tokens. Raises ConfigError."""
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
