"""Who comes to a master: the credentials that are in force now, read again when their file has changed.

A new file takes the place of the old one whole, or not at all. Threads may ask; the loop alone has it read again.
"""

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from typing import Final

from kvstore.protocol.errors import Denied, KVStoreError, Unauthorized
from kvstore.security.config_file import signature
from kvstore.security.credentials import read_credentials
from kvstore.security.identity import PEER_MASTER, Identity, IdentityKind

MASTER_KEY_BYTES: Final = 32
"""At random."""


class Authenticator:
    """See the module."""

    def __init__(self, path: str, *, nodes_have_certificates: bool = False, wall_s: Callable[[], float] = time.time) -> None:
        """Of the tokens file at `path`; "": everybody is let in. Raises ConfigError."""
        self._path = path
        self._nodes_have_certificates = nodes_have_certificates
        self._wall_s = wall_s
        self._seen = signature(path)
        self._credentials = read_credentials(path, nodes_have_certificates=nodes_have_certificates)
        self.master_key = secrets.token_hex(MASTER_KEY_BYTES)
        """By which other masters of the cluster are let in: told in the catalog, which they alone read, and over with this process."""
        self._lock = threading.Lock()
        self._refused = 0

    @property
    def allows_anonymous(self) -> bool:
        return self._credentials.allows_anonymous

    @property
    def refused(self) -> int:
        """Wrong and expired credentials so far."""
        return self._refused

    def identify(self, tenant: str, token: str, certificate: Identity | None = None) -> Identity:
        """As Credentials.identify, now."""
        try:
            return self._credentials.identify(tenant, token, now_s=self._wall_s(), certificate=certificate)
        except KVStoreError:
            self._count()
            raise

    def identify_node(self, name: str, token: str, certificate: Identity | None = None) -> Identity:
        """A node that says that it is the one of this name. Raises Unauthorized: it shows no join token, or another node's."""
        try:
            found = self._credentials.identify("", token, now_s=self._wall_s(), certificate=certificate)
            if found.kind not in (IdentityKind.NODE, IdentityKind.ANONYMOUS) or not found.may_use_name(name):
                raise Denied(f"{found} is not node {name!r}")
        except KVStoreError:
            self._count()
            raise Unauthorized(
                f"node {name!r} may not join, its join token is missing or wrong: give it, in join_token or join_token_file, one that the "
                "master's tokens file has in [nodes], by this name or by *"
            ) from None
        return found

    def identify_master(self, key: str) -> Identity:
        """Another master of the cluster, by this one's `master_key`. Raises Unauthorized."""
        if not hmac.compare_digest(key.encode(errors="replace"), self.master_key.encode()):
            self._count()
            raise Unauthorized("a master's key that is not this one's: who asks must have read it in the catalog since this master started")
        return PEER_MASTER

    def owner(self, token: str) -> Identity | None:
        """As Credentials.owner, now."""
        return self._credentials.owner(token)

    def holds(self, identity: Identity) -> bool:
        """Would whoever was identified so be identified so again?"""
        return self._credentials.holds(identity, now_s=self._wall_s())

    def reread(self) -> list[Identity]:
        """Read the file again: who is known no more, or not as the same. Raises ConfigError for a file that is no good; then nothing has
        changed."""
        self._seen = signature(self._path)
        former, credentials = self._credentials, read_credentials(self._path, nodes_have_certificates=self._nodes_have_certificates)
        self._credentials = credentials
        return credentials.revoked_since(former)

    def identities(self) -> frozenset[Identity]:
        """Of all tokens that are in force."""
        return self._credentials.identities()

    def next_to_expire(self) -> tuple[Identity, ...]:
        """See Credentials.next_to_expire."""
        return self._credentials.next_to_expire

    def has_changed(self) -> bool:
        """Is the file another one, or another's, than when it was last read?"""
        return signature(self._path) != self._seen

    def _count(self) -> None:
        with self._lock:
            self._refused += 1
