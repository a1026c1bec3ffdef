"""A ticket as bytes: who may do what at one node until when, under a key that only the master and that node have.

    offset  size  field
    0       1     1: this form
    1       4     key id: which of the node's keys it is under
    5       4     node id
    9       8     when it ends, in milliseconds since its key was made
    17      1     role: 1 read, 2 write, 3 admin; 0: a pass of another node
    18      8     which credential it was issued upon, as the master numbers them
    26      16    nonce: no two tickets are alike
    42      1     length of the tenant's name in bytes
    43      4     number of blocks, of a pass
    47      32    SHA-256 of the certificate upon which it was issued; zeros: upon a token alone
    79            the tenant's name in UTF-8; for each block 8 bytes, `fingerprint`
            32    HMAC-SHA256 under the key of all bytes before

All integers are little-endian. It says nothing of the token, and a node's key opens no other node. Whoever overhears one can use it at that
node until it ends: against that there is TLS.
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
"""In place of a role: another node may read the blocks named."""
_HEAD: Final = struct.Struct("<BIIQBQ16sBI32s")
_GENERATION: Final = struct.Struct("<Q")
_FINGERPRINT: Final = np.dtype("<u8")
MAX_KEYS: Final = 16
"""Keys kept: those of registrations and rotations so close that tickets under the oldest may not have ended."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """`ends_ms` counts from the making of the key. `blocks` are a pass's, as fingerprints. `certificate` is the fingerprint of the
    bearer's certificate, b"" where it was issued upon a token alone."""

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
    """Stands for a block in a pass: xxh3_64 of the generation, as 8 bytes, and the key. Whom a pass is for did not choose its blocks, so
    that it is no use to him to find another one of the same fingerprint."""
    return xxhash.xxh3_64_intdigest(_GENERATION.pack(generation) + key)


def seal(ticket: Ticket, secret: bytes) -> bytes:
    """The bytes to be shown."""
    tenant = ticket.tenant.encode()
    head = _HEAD.pack(
        *(FORM, ticket.key_id, ticket.node_id, ticket.ends_ms, ticket.role, ticket.credential, ticket.nonce),
        *(len(tenant), len(ticket.blocks), ticket.certificate or _NO_CERTIFICATE),
    )
    body = head + tenant + np.fromiter(ticket.blocks, _FINGERPRINT, len(ticket.blocks)).tobytes()
    return body + _mac(body, secret)


def key_id_of(data: bytes) -> int:
    """Which key it says that it is under. Raises InvalidTicket: these bytes are no ticket."""
    if len(data) < _HEAD.size + MAC_BYTES or data[0] != FORM:
        raise InvalidTicket("this is no ticket: its master gives them to whoever shows his token")
    return int(_HEAD.unpack_from(data)[1])


def unseal(data: bytes, secret: bytes) -> Ticket:
    """What the bytes say that `key_id_of` has read. Raises InvalidTicket: they were not sealed with this secret."""
    end = len(data) - MAC_BYTES
    if not hmac.compare_digest(_mac(data[:end], secret), data[end:]):
        raise InvalidTicket("this ticket is not of this cluster's master, or was changed")
    _form, key_id, node_id, ends_ms, role, credential, nonce, tenant_bytes, count, certificate = _HEAD.unpack_from(data)
    at = _HEAD.size + tenant_bytes
    if role > Role.ADMIN or count > MAX_BATCH or at + count * _FINGERPRINT.itemsize != end:
        raise InvalidTicket("this ticket is of another form: run releases next to each other")
    blocks = frozenset(np.frombuffer(data, _FINGERPRINT, count, at).tolist())
    try:
        tenant = data[_HEAD.size : at].decode()
    except UnicodeDecodeError:
        raise InvalidTicket("this ticket names no tenant that is text") from None
    shown = certificate if certificate != _NO_CERTIFICATE else b""
    return Ticket(key_id, node_id, ends_ms, role, credential, nonce, tenant, blocks, shown)


def _mac(body: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, body, "sha256")


@dataclass(frozen=True, slots=True)
class _TicketKey:
    secret: bytes = field(repr=False)
    born_ns: int
    """On this node's clock: as if the key had been made at the moment at which the node was given it, less the age it had then."""
    issuer: str


@dataclass(frozen=True, slots=True)
class TicketClaims:
    """A good ticket: until when it is, on this node's clock, and which master issued it."""

    ticket: Ticket
    until_ns: int
    issuer: str


class Keyring:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(self) -> None:
        self._keys: OrderedDict[int, _TicketKey] = OrderedDict()

    def add(self, key_id: int, secret: bytes, *, age_ms: int, issuer: str, now_ns: int) -> None:
        """A key that the master `issuer` made `age_ms` ago. Those before stay, for the tickets that were issued under them."""
        self._keys.pop(key_id, None)
        self._keys[key_id] = _TicketKey(secret, now_ns - age_ms * 1_000_000, issuer)
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)

    def check(self, data: bytes, *, node_id: int, now_ns: int) -> TicketClaims:
        """Raises InvalidTicket: it is under no key of this node, was changed, is another node's, or has ended."""
        key = self._keys.get(key_id_of(data))
        if key is None:
            raise InvalidTicket("this ticket is under no key that this node has: ask its master for another one")
        ticket = unseal(data, key.secret)
        if ticket.node_id != node_id:
            raise InvalidTicket(f"this ticket is for node {ticket.node_id}, and this is node {node_id}")
        until_ns = key.born_ns + ticket.ends_ms * 1_000_000
        if now_ns >= until_ns:
            raise InvalidTicket("this ticket has ended: ask the master for another one")
        return TicketClaims(ticket, until_ns, key.issuer)
