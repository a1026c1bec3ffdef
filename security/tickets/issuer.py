"""Issuer of tickets at a master: keys of the nodes, tickets and passes, revocation.

Sans-I/O; time and randomness are passed in.

- A key is random, belongs to one registration of one node, and is in memory only; the catalog has no secrets.
- After a failover the new master makes its own keys. Nodes keep the former ones until their tickets have expired, so
  sessions survive the failover.
- A ticket's expiry counts from the creation of its key, on this master's monotonic clock; the node counts from the
  key's arrival. Clocks need not agree, and a ticket lives longer by the key's time in transit.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvstore.security.identity import Identity
from kvstore.security.tickets.ticket import NONCE_BYTES, PASS, SECRET_BYTES, Ticket, fingerprint, seal

REUSED_SHARE: Final = 4
"""A ticket is reused for all bearers of the same credential for 1/REUSED_SHARE of its lifetime: 1,000 tickets take
milliseconds."""
PASS_TTL_S: Final = 60.0
"""Lifetime of a pass, equal to that of a CopyBlocks: copies wait in the node's queue."""
MAX_REVOKED: Final = 65_536
"""Revoked credentials remembered for unreachable nodes, as many as a node remembers: an operator revokes a few a day.
"""
MAX_CERTIFICATES: Final = 1024
"""Certificates of one bearer whose tickets are cached."""


@dataclass(frozen=True, slots=True)
class NodeKey:
    """Ticket key shared by a node and this master."""

    key_id: int
    secret: bytes = field(repr=False)
    made_ns: int

    def age_ms(self, now_ns: int) -> int:
        return (now_ns - self.made_ns) // 1_000_000


@dataclass(slots=True)
class _Keys:
    """Keys of one node: the current one, and the next one, which is being sent."""

    current: NodeKey
    next: NodeKey | None = None
    tickets: dict[Identity, dict[bytes, tuple[int, bytes]]] = field(default_factory=dict)
    """Cached (time of issue, ticket) by bearer and certificate."""


@dataclass(slots=True)
class _Revoked:
    """A revoked credential, until all nodes have confirmed it."""

    until_ns: int
    """Until then a node may register with sessions of a former master's tickets, which it must end."""
    unconfirmed: set[int]
    """Nodes that have not confirmed the revocation; their sessions continue."""

    def is_over(self, now_ns: int) -> bool:
        return not self.unconfirmed and self.until_ns <= now_ns


class Issuer:
    """Makes keys, tickets and passes, and tracks revocations. Not thread-safe: only the master's loop calls it."""

    def __init__(self, *, ticket_ttl_s: float, key_ttl_s: float, random_bytes: Callable[[int], bytes]) -> None:
        """For the durations see the settings `ticket_ttl_s` and `ticket_key_ttl_s`."""
        self._ticket_ttl_ns = int(ticket_ttl_s * 1e9)
        self._key_ttl_ns = int(key_ttl_s * 1e9)
        self._random_bytes = random_bytes
        self._nodes: dict[int, _Keys] = {}
        self._numbers: dict[Identity, int] = {}
        """Number of each bearer's credential in its tickets. Random, so that it reveals nothing of the token."""
        self._revoked: dict[tuple[str, int], _Revoked] = {}
        """By tenant and number, oldest first. An expired entry is removed when all older ones are."""

    @property
    def usable_ms(self) -> int:
        """Shortest remaining lifetime of a ticket issued now."""
        return (self._ticket_ttl_ns - self._ticket_ttl_ns // REUSED_SHARE) // 1_000_000

    # --- keys ---

    def register(self, node_id: int, now_ns: int) -> NodeKey:
        """Return a new key for a new registration of the node."""
        key = self._make_key(now_ns)
        self._nodes[node_id] = _Keys(key)
        return key

    def forget(self, node_id: int) -> None:
        """Remove a node."""
        self._nodes.pop(node_id, None)
        for each in self._revoked.values():
            each.unconfirmed.discard(node_id)

    def due_keys(self, now_ns: int) -> list[tuple[int, NodeKey]]:
        """Return nodes whose key is older than `ticket_key_ttl_s`, with their next key, which is to be sent;
        `confirm_key` must follow.
        """
        due = []
        for node_id, keys in self._nodes.items():
            if keys.next is None and now_ns - keys.current.made_ns >= self._key_ttl_ns:
                keys.next = self._make_key(now_ns)
                due.append((node_id, keys.next))
        return due

    def confirm_key(self, node_id: int, key: NodeKey, *, has_it: bool) -> None:
        """Use the key from now on if the node has it; otherwise drop it, and a later `due_keys` makes another."""
        keys = self._nodes.get(node_id)
        if keys is not None and keys.next is key:
            keys.next = None
            if has_it:
                keys.current = key
                keys.tickets.clear()

    def _make_key(self, now_ns: int) -> NodeKey:
        key_id = int.from_bytes(self._random_bytes(4), "little")
        return NodeKey(key_id, self._random_bytes(SECRET_BYTES), now_ns)

    # --- tickets ---

    def issue_ticket(self, node_id: int, bearer: Identity, *, left_s: float, now_ns: int) -> bytes:
        """Return a ticket for a tenant whose credential is valid for another `left_s`; b"" for a node without a key.

        A credential's number does not depend on the certificate: nodes check the ticket's certificate for revocation
        themselves.
        """
        keys = self._nodes.get(node_id)
        if keys is None:
            return b""
        certificate, bearer = bearer.certificate, replace(bearer, certificate=b"")
        of_bearer = keys.tickets.setdefault(bearer, {})
        made_ns, ticket = of_bearer.get(certificate, (0, b""))
        if not ticket or now_ns - made_ns >= self._ticket_ttl_ns // REUSED_SHARE:
            ends_ns = now_ns + min(self._ticket_ttl_ns, int(min(left_s, 1e9) * 1e9))
            if bearer not in self._numbers:
                self._numbers[bearer] = int.from_bytes(self._random_bytes(8), "little")
            ticket = self._seal(keys.current, node_id, ends_ns, bearer, certificate=certificate)
            if len(of_bearer) >= MAX_CERTIFICATES:
                of_bearer.clear()
            of_bearer[certificate] = now_ns, ticket
        return ticket

    def issue_pass(self, source: int, tenant: str, keys: Sequence[bytes], generations: Sequence[int], now_ns: int) -> bytes:
        """Return a pass for another node to read these blocks at node `source`; b"" if `source` has no key."""
        found = self._nodes.get(source)
        if found is None:
            return b""
        key, blocks = found.current, frozenset(map(fingerprint, keys, generations))
        ends_ms = self._ends_ms(key, now_ns + int(PASS_TTL_S * 1e9))
        return seal(Ticket(key.key_id, source, ends_ms, PASS, 0, self._random_bytes(NONCE_BYTES), tenant, blocks), key.secret)

    def _seal(self, key: NodeKey, node_id: int, ends_ns: int, bearer: Identity, *, certificate: bytes) -> bytes:
        ticket = Ticket(
            key.key_id,
            node_id,
            self._ends_ms(key, ends_ns),
            int(bearer.role),
            self._numbers[bearer],
            self._random_bytes(NONCE_BYTES),
            bearer.name,
            certificate=certificate,
        )
        return seal(ticket, key.secret)

    def _ends_ms(self, key: NodeKey, ends_ns: int) -> int:
        return (ends_ns - key.made_ns) // 1_000_000

    # --- revoking ---

    def bearers(self) -> list[Identity]:
        """Return the bearers of tickets, without revoked ones."""
        return list(self._numbers)

    def revoke(self, bearer: Identity, now_ns: int) -> int:
        """Revoke the bearer's credential. Return its number, to be sent to the nodes."""
        number = self._numbers.pop(bearer)
        # From the front only: scanning all entries for each of thousands of revocations would block the loop for minutes.
        while self._revoked and (len(self._revoked) >= MAX_REVOKED or self._oldest().is_over(now_ns)):
            del self._revoked[next(iter(self._revoked))]
        self._revoked[bearer.name, number] = _Revoked(now_ns + self._ticket_ttl_ns, set(self._nodes))
        for keys in self._nodes.values():
            keys.tickets.pop(bearer, None)
        return number

    def _oldest(self) -> _Revoked:
        return next(iter(self._revoked.values()))

    def confirm_revoked(self, node_id: int, tenant: str, numbers: Collection[int]) -> None:
        """Record that the node has applied these revocations."""
        for number in numbers:
            if (tenant, number) in self._revoked:
                self._revoked[tenant, number].unconfirmed.discard(node_id)

    def revoked(self) -> dict[str, list[int]]:
        """Return the numbers of revoked credentials by tenant, for a node that registers again."""
        found: dict[str, list[int]] = {}
        for tenant, number in sorted(self._revoked):
            found.setdefault(tenant, []).append(number)
        return found
