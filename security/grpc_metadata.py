"""How a credential goes with a gRPC call: two entries of its metadata, in UTF-8; of a master that asks another one, an entry of its own.

Metadata and not fields of each request, so that one look tells of every call, of those to come too, whose it is.
"""

from collections.abc import Iterable
from typing import Any, Final

TENANT: Final = "kvstore-tenant-bin"
TOKEN: Final = "kvstore-token-bin"
"""gRPC takes any bytes under a name that ends so."""
MASTER_KEY: Final = "kvstore-master-key"
"""What the master that is asked has said in the catalog, in hexadecimal digits."""


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
