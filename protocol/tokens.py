"""Whether a tenant's token is right. Daemons keep digests, never tokens."""

import hashlib
import hmac
from collections.abc import Mapping

from kvstore.protocol.errors import Unauthorized


def check_token(digests: Mapping[str, bytes], tenant: str, token: str) -> None:
    """`digests` is SHA-256 of the token by tenant; empty, it lets everyone in.

    Raises Unauthorized, with one text for an unknown tenant and a wrong token, so that asking tells nobody who exists.
    """
    if not digests:
        return
    digest = hashlib.sha256(token.encode()).digest()
    if not hmac.compare_digest(digest, digests.get(tenant, b"")):
        raise Unauthorized(f"unknown tenant {tenant!r} or wrong token")
