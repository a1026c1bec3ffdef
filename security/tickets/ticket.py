"""Ticket format: tenant, role and expiry of access to one node, under a key that only the master and that node have.

    offset  size  field
    0       1     1: version of the format
    1       4     key id, of the node's keys
    5       4     node id
    9       8     expiry, in milliseconds since the key was made
    17      1     role: 1 read, 2 write, 3 admin; 0: a pass of another node
    18      8     number of the credential, assigned by the master
    26      16    nonce: all tickets differ
    42      1     length of the tenant's name in bytes
    43      4     number of blocks, of a pass
    47      32    SHA-256 of the certificate for which it was issued; zeros: for a token alone
    79            the tenant's name in UTF-8; for each block 8 bytes, `fingerprint`
            32    HMAC-SHA256 under the key of all bytes before

All integers are little-endian. A ticket reveals nothing of the token, and is valid at one node only. An intercepted one
can be used there until it expires; TLS prevents that.
"""

import hmac
import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import xxhash

from kvstore.protocol.errors import InvalidTicket
from kvstore.protocol.frames import MAX_BATCH
from kvstore.security.identity import Role

FORM: Final = 1
NONCE_BYTES: Final = 16
SECRET_BYTES: Final = 32
CERTIFICATE_BYTES: Final = 32
_NO_CERTIFICATE: Final = bytes(CERTIFICATE_BYTES)
MAC_BYTES: Final = 32
PASS: Final = 0
"""In place of a role: another node may read the listed blocks."""
_HEAD: Final = struct.Struct("<BIIQBQ16sBI32s")
_GENERATION: Final = struct.Struct("<Q")
_FINGERPRINT: Final = np.dtype("<u8")
MAX_KEYS: Final = 16
"""Keys kept by a node: enough for quick registrations and rotations while tickets under the oldest are valid."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Content of a ticket or pass.

    `ends_ms` counts from the creation of the key. `blocks`: of a pass, as fingerprints. `certificate`: fingerprint of
    the bearer's certificate, b"" if issued for a token alone.
    """

    key_id: int
    node_id: int
    ends_ms: int
    role: int
    credential: int
    nonce: bytes
    tenant: str
    blocks: frozenset[int] = frozenset()
    certificate: bytes = b""


def fingerprint(key: bytes, generation: int) -> int:
    """Return a block's fingerprint in a pass: xxh3_64 of the generation, as 8 bytes, and the key.

    A collision does not help the pass's bearer, which does not choose the blocks.
    """
    return xxhash.xxh3_64_intdigest(_GENERATION.pack(generation) + key)


def seal(ticket: Ticket, secret: bytes) -> bytes:
    """Return the ticket's bytes."""
    tenant = ticket.tenant.encode()
    head = _HEAD.pack(
        *(FORM, ticket.key_id, ticket.node_id, ticket.ends_ms, ticket.role, ticket.credential, ticket.nonce),
        *(len(tenant), len(ticket.blocks), ticket.certificate or _NO_CERTIFICATE),
    )
    body = head + tenant + np.fromiter(ticket.blocks, _FINGERPRINT, len(ticket.blocks)).tobytes()
    return body + _mac(body, secret)


def key_id_of(data: bytes) -> int:
    """Return the key id of a ticket, unverified. Raises InvalidTicket: malformed."""
    if len(data) < _HEAD.size + MAC_BYTES or data[0] != FORM:
        raise InvalidTicket("the ticket is malformed: request one from the master, with a token")
    return int(_HEAD.unpack_from(data)[1])


def unseal(data: bytes, secret: bytes) -> Ticket:
    """Verify and decode bytes that `key_id_of` has accepted.

    Raises InvalidTicket: they were not sealed with this secret.
    """
    end = len(data) - MAC_BYTES
    if not hmac.compare_digest(_mac(data[:end], secret), data[end:]):
        raise InvalidTicket("the ticket is not from this cluster's master, or was modified: request another one from the master")
    _form, key_id, node_id, ends_ms, role, credential, nonce, tenant_bytes, count, certificate = _HEAD.unpack_from(data)
    at = _HEAD.size + tenant_bytes
    if role > Role.ADMIN or count > MAX_BATCH or at + count * _FINGERPRINT.itemsize != end:
        raise InvalidTicket("the ticket has an unknown format: run the same release on all daemons")
    blocks = frozenset(np.frombuffer(data, _FINGERPRINT, count, at).tolist())
    try:
        tenant = data[_HEAD.size : at].decode()
    except UnicodeDecodeError:
        raise InvalidTicket("the ticket's tenant is not UTF-8: request another one from the master") from None
    bearer_certificate = certificate if certificate != _NO_CERTIFICATE else b""
    return Ticket(key_id, node_id, ends_ms, role, credential, nonce, tenant, blocks, bearer_certificate)


def _mac(body: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, body, "sha256")


@dataclass(frozen=True, slots=True)
class _TicketKey:
    secret: bytes = field(repr=False)
    born_ns: int
    """Creation on this node's clock: time of arrival, less the key's age then."""
    issuer: str


@dataclass(frozen=True, slots=True)
class TicketClaims:
    """A verified ticket, with its expiry on this node's clock and the master that issued it."""

    ticket: Ticket
    until_ns: int
    issuer: str


class Keyring:
    """Ticket keys of a node. Not thread-safe: only the node's loop calls it."""

    def __init__(self) -> None:
        self._keys: OrderedDict[int, _TicketKey] = OrderedDict()

    def add(self, key_id: int, secret: bytes, *, age_ms: int, issuer: str, now_ns: int) -> None:
        """Add a key that the master `issuer` made `age_ms` ago. Earlier ones are kept for their tickets."""
        self._keys.pop(key_id, None)
        self._keys[key_id] = _TicketKey(secret, now_ns - age_ms * 1_000_000, issuer)
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)

    def check(self, data: bytes, *, node_id: int, now_ns: int) -> TicketClaims:
        """Verify a ticket. Raises InvalidTicket: unknown key, modified, for another node, or expired."""
        key = self._keys.get(key_id_of(data))
        if key is None:
            raise InvalidTicket("the ticket's key is unknown to this node: request another ticket from the master")
        ticket = unseal(data, key.secret)
        if ticket.node_id != node_id:
            raise InvalidTicket(f"the ticket is for node {ticket.node_id}, and this is node {node_id}: request one for it")
        until_ns = key.born_ns + ticket.ends_ms * 1_000_000
        if now_ns >= until_ns:
            raise InvalidTicket("the ticket has expired: request another one from the master")
        return TicketClaims(ticket, until_ns, key.issuer)
