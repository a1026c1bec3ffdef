"""Who may ask what on a daemon's HTTP port: this host where there are no credentials, else whoever shows an operator's token."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.protocol.errors import ConfigError, KVStoreError
from kvstore.protocol.errors import Denied as NotAllowed
from kvstore.security.actor import HTTP, Actor, kind_of
from kvstore.security.config_file import signature
from kvstore.security.credentials import digest_of
from kvstore.security.guard import Guard
from kvstore.security.identity import STRANGER, Identity, Kind
from kvstore.telemetry.http.access import Access, Authorize, Explain, Identify, this_host_only

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
