"""Whether a tenant's token is right, and what a node shows another in its place. Daemons keep digests, never tokens."""

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


def node_pass(digests: Mapping[str, bytes], tenant: str, *, master_epoch: int, source: int) -> str:
    """What a node says instead of the tenant's token to node `source`, whose blocks of `tenant` it is to read.

    Both know the digest from their master. It is never sent: the pass is its HMAC over the master's epoch and the source, worth nothing
    at another node or under another master. Raises Unauthorized for a tenant without a digest, unless there are none at all.
    """
    if not digests:
        return ""
    if tenant not in digests:
        raise Unauthorized(f"no token of tenant {tenant!r} is known here")
    return hmac.new(digests[tenant], b"kvstore: node %d under master %d" % (source, master_epoch), hashlib.sha256).hexdigest()


def check_node_pass(digests: Mapping[str, bytes], tenant: str, shown: str, *, master_epoch: int, source: int) -> None:
    """Raises Unauthorized unless `shown` is the pass of a node that reads `tenant`'s blocks here, at node `source`."""
    right = node_pass(digests, tenant, master_epoch=master_epoch, source=source)
    if digests and not hmac.compare_digest(right.encode(), shown.encode()):
        raise Unauthorized(f"this is no pass for tenant {tenant!r} at node {source} under master {master_epoch}")
