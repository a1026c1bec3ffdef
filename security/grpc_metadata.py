"""How a credential goes with a gRPC call: two entries of its metadata, in UTF-8; of a master that asks another one, an entry of its own.

Metadata and not fields of each request, so that one look tells of every call, of those to come too, whose it is.
"""

import json
from collections.abc import Iterable
from typing import Any, Final

from kvstore.security.actor import THIS_MASTER, Actor

TENANT: Final = "kvstore-tenant-bin"
TOKEN: Final = "kvstore-token-bin"
"""gRPC takes any bytes under a name that ends so."""
MASTER_KEY: Final = "kvstore-master-key"
"""What the master that is asked has said in the catalog, in hexadecimal digits."""
ACTOR: Final = "kvstore-actor-bin"
"""Of a master's call: the operator for whom it asks, as JSON."""


def as_metadata(tenant: str, token: str) -> tuple[tuple[str, bytes], ...]:
    """For the `metadata` of a call; nothing for who has nothing to show."""
    if not (tenant or token):
        return ()
    return (TENANT, tenant.encode(errors="surrogatepass")), (TOKEN, token.encode(errors="surrogatepass"))


def master_key(metadata: Iterable[Any]) -> str | None:
    """That a call shows; None where it shows none."""
    return next((value for key, value in metadata if key == MASTER_KEY and isinstance(value, str)), None)


def from_metadata(metadata: Iterable[Any]) -> tuple[str, str] | None:
    """(tenant, token) of a call's metadata; None where it shows none, or none that can be read."""
    shown = {key: value for key, value in metadata if key in (TENANT, TOKEN) and isinstance(value, bytes)}
    if TOKEN not in shown:
        return None
    try:
        return shown.get(TENANT, b"").decode(errors="surrogatepass"), shown[TOKEN].decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return None


def on_behalf_of(actor: Actor) -> tuple[tuple[str, bytes], ...]:
    """For the `metadata` of a master's call to another one; nothing for what a master does by itself."""
    return ((ACTOR, json.dumps(actor.to_dict()).encode()),) if actor != THIS_MASTER else ()


def actor_from(metadata: Iterable[Any]) -> Actor:
    """The operator for whom a master asks; THIS_MASTER where the call names none, or none that can be read. For calls of masters only:
    anybody can send this."""
    shown = next((value for key, value in metadata if key == ACTOR), b"")
    try:
        return Actor.from_dict(json.loads(shown))
    except ValueError:
        return THIS_MASTER
