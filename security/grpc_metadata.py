"""Credentials in gRPC metadata: tenant and token, in UTF-8; between masters, the master key.

Metadata instead of request fields, so that one interceptor authenticates every call.
"""

import json
from collections.abc import Iterable
from typing import Any, Final

from kvstore.security.actor import THIS_MASTER, Actor

TENANT: Final = "kvstore-tenant-bin"
TOKEN: Final = "kvstore-token-bin"
"""gRPC accepts any bytes under a name with the suffix -bin."""
MASTER_KEY: Final = "kvstore-master-key"
"""Key of the called master, from the catalog, in hexadecimal digits."""
ACTOR: Final = "kvstore-actor-bin"
"""In a master's call: the operator on whose behalf it calls, as JSON."""


def as_metadata(tenant: str, token: str) -> tuple[tuple[str, bytes], ...]:
    """Return the `metadata` of a call; empty without credentials."""
    if not (tenant or token):
        return ()
    return (TENANT, tenant.encode(errors="surrogatepass")), (TOKEN, token.encode(errors="surrogatepass"))


def master_key(metadata: Iterable[Any]) -> str | None:
    """Return the master key of a call, or None."""
    return next((value for key, value in metadata if key == MASTER_KEY and isinstance(value, str)), None)


def from_metadata(metadata: Iterable[Any]) -> tuple[str, str] | None:
    """Return (tenant, token) of a call; None if absent or not UTF-8."""
    shown = {key: value for key, value in metadata if key in (TENANT, TOKEN) and isinstance(value, bytes)}
    if TOKEN not in shown:
        return None
    try:
        return shown.get(TENANT, b"").decode(errors="surrogatepass"), shown[TOKEN].decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return None


def on_behalf_of(actor: Actor) -> tuple[tuple[str, bytes], ...]:
    """Return the `metadata` of a master's call on behalf of `actor`; empty for the master itself."""
    return ((ACTOR, json.dumps(actor.to_dict()).encode()),) if actor != THIS_MASTER else ()


def actor_from(metadata: Iterable[Any]) -> Actor:
    """Return the operator on whose behalf a master calls; THIS_MASTER if absent or malformed.

    Only for calls with a master key.
    """
    shown = next((value for key, value in metadata if key == ACTOR), b"")
    try:
        return Actor.from_dict(json.loads(shown))
    except ValueError:
        return THIS_MASTER
