"""Authenticator of a master: the current credentials, reloaded when their file changes.

A new file replaces the old one entirely, or not at all if it is invalid. Thread-safe, but only the loop reloads.
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
"""Random bytes of a master's key."""


class Authenticator:
    """Verifies tokens, join tokens and keys of other masters; counts refusals."""

    def __init__(self, path: str, *, nodes_have_certificates: bool = False, wall_s: Callable[[], float] = time.time) -> None:
        """Read the tokens file at `path`; "": authentication is off. Raises ConfigError."""
        self._path = path
        self._nodes_have_certificates = nodes_have_certificates
        self._wall_s = wall_s
        self._seen = signature(path)
        self._credentials = read_credentials(path, nodes_have_certificates=nodes_have_certificates)
        self.master_key = secrets.token_hex(MASTER_KEY_BYTES)
        """Key for other masters of the cluster: random, of this process, published in the catalog, which only masters
        read."""
        self._lock = threading.Lock()
        self._refused = 0

    @property
    def allows_anonymous(self) -> bool:
        return self._credentials.allows_anonymous

    @property
    def refused(self) -> int:
        """Number of wrong and expired credentials so far."""
        return self._refused

    def identify(self, tenant: str, token: str, certificate: Identity | None = None) -> Identity:
        """Credentials.identify at the current time; counts failures."""
        try:
            return self._credentials.identify(tenant, token, now_s=self._wall_s(), certificate=certificate)
        except KVStoreError:
            self._count()
            raise

    def identify_node(self, name: str, token: str, certificate: Identity | None = None) -> Identity:
        """Identify a node by name and join token or certificate. Raises Unauthorized: none, or another node's."""
        try:
            found = self._credentials.identify("", token, now_s=self._wall_s(), certificate=certificate)
            if found.kind not in (IdentityKind.NODE, IdentityKind.ANONYMOUS) or not found.may_use_name(name):
                raise Denied(f"{found} is not node {name!r}")
        except KVStoreError:
            self._count()
            raise Unauthorized(
                f"node {name!r} may not join, its join token is missing or wrong: set join_token or join_token_file to one of [nodes] in "
                "the master's tokens file, by this name or by *"
            ) from None
        return found

    def identify_master(self, key: str) -> Identity:
        """Identify another master of the cluster by this one's `master_key`. Raises Unauthorized."""
        if not hmac.compare_digest(key.encode(errors="replace"), self.master_key.encode()):
            self._count()
            raise Unauthorized("the master key is not this master's: read it from the catalog again, it changes when this master starts")
        return PEER_MASTER

    def owner(self, token: str) -> Identity | None:
        """Credentials.owner of the current file."""
        return self._credentials.owner(token)

    def holds(self, identity: Identity) -> bool:
        """Return True if the identity's credential is still valid."""
        return self._credentials.holds(identity, now_s=self._wall_s())

    def reread(self) -> list[Identity]:
        """Reload the file.

        Return the identities that are revoked or changed. Raises ConfigError for an invalid file, without a change.
        """
        self._seen = signature(self._path)
        former, credentials = self._credentials, read_credentials(self._path, nodes_have_certificates=self._nodes_have_certificates)
        self._credentials = credentials
        return credentials.revoked_since(former)

    def identities(self) -> frozenset[Identity]:
        """Return the identities of all tokens."""
        return self._credentials.identities()

    def next_to_expire(self) -> tuple[Identity, ...]:
        """Credentials.next_to_expire of the current file."""
        return self._credentials.next_to_expire

    def has_changed(self) -> bool:
        """Return True if the file has changed since it was last read."""
        return signature(self._path) != self._seen

    def _count(self) -> None:
        with self._lock:
            self._refused += 1
