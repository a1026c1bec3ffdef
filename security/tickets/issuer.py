"""The master's side of tickets: it makes each node's keys, and tickets under them. Sans-I/O; time and randomness are passed in.

Keys are random, of one registration of one node, and in memory only: a master that takes over makes its own when the nodes register with
it, and nodes keep those of the master before until the tickets under them have ended. So nothing has to be kept secret in the catalog, and
no open session ends with its master. A ticket's end counts from the making of its key, on this master's monotonic clock: the node counts
from when it was given the key, so that clocks need not agree, and neither may jump; a ticket lives longer by what the key took to arrive.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvstore.security.identity import Identity
from kvstore.security.tickets.ticket import NONCE_BYTES, PASS, SECRET_BYTES, Ticket, fingerprint, seal

REUSED_SHARE: Final = 4
"""A ticket is given to all who show the same credential for a quarter of its time: 1,000 of them cost the loop some milliseconds."""
PASS_TTL_S: Final = 60.0
"""As long as an order to copy stands: what is fetched waits in the node's queue before."""
MAX_REVOKED: Final = 65_536
"""Revoked credentials that are remembered for nodes out of reach, as many as a node remembers: an operator revokes a few a day."""
MAX_CERTIFICATES: Final = 1024
"""Certificates of one bearer whose tickets are kept to be given out again."""


@dataclass(frozen=True, slots=True)
class NodeKey:
    """A key that a node and this master share."""

    key_id: int
    secret: bytes = field(repr=False)
    made_ns: int

    def age_ms(self, now_ns: int) -> int:
        return (now_ns - self.made_ns) // 1_000_000


@dataclass(slots=True)
class _Keys:
    """Of one node: the one in use, and the one that it is being told of."""

    current: NodeKey
    next: NodeKey | None = None
    tickets: dict[Identity, dict[bytes, tuple[int, bytes]]] = field(default_factory=dict)
    """By bearer, and by the certificate that was shown: when the ticket was made, and the ticket."""


@dataclass(slots=True)
class _Revoked:
    """What was revoked, until it has not to be told of any more."""

    until_ns: int
    """Before, a node may register in which a former master's tickets let the tenant in: it ends those sessions when it hears of it."""
    unconfirmed: set[int]
    """Nodes that have not said that they know: the sessions that it opened there go on after its tickets have ended."""

    def is_over(self, now_ns: int) -> bool:
        return not self.unconfirmed and self.until_ns <= now_ns


class Issuer:
    """Not thread-safe: the master's loop is the only caller."""

    def __init__(self, *, ticket_ttl_s: float, key_ttl_s: float, random_bytes: Callable[[int], bytes]) -> None:
        """For the times see the settings `ticket_ttl_s` and `ticket_key_ttl_s`."""
        self._ticket_ttl_ns = int(ticket_ttl_s * 1e9)
        self._key_ttl_ns = int(key_ttl_s * 1e9)
        self._random_bytes = random_bytes
        self._nodes: dict[int, _Keys] = {}
        self._numbers: dict[Identity, int] = {}
        """Of those who have tickets: by which nodes know what they have shown. Random: a number tells nothing of a token."""
        self._revoked: dict[tuple[str, int], _Revoked] = {}
        """By tenant and number, oldest first: for nodes that were out of reach then. What is over goes when all before it has."""

    @property
    def usable_ms(self) -> int:
        """How long a ticket that is given out now can be used at least."""
        return (self._ticket_ttl_ns - self._ticket_ttl_ns // REUSED_SHARE) // 1_000_000

    # --- keys ---

    def register(self, node_id: int, now_ns: int) -> NodeKey:
        """A new process of the node, or a new link of it, has this key from now on."""
        key = self._make_key(now_ns)
        self._nodes[node_id] = _Keys(key)
        return key

    def forget(self, node_id: int) -> None:
        """There is no such node any more, and nothing that it is to be told."""
        self._nodes.pop(node_id, None)
        for each in self._revoked.values():
            each.unconfirmed.discard(node_id)

    def due_keys(self, now_ns: int) -> list[tuple[int, NodeKey]]:
        """Nodes whose key has been in use for `ticket_key_ttl_s`, and the next one: to be told, until `confirm_key`."""
        due = []
        for node_id, keys in self._nodes.items():
            if keys.next is None and now_ns - keys.current.made_ns >= self._key_ttl_ns:
                keys.next = self._make_key(now_ns)
                due.append((node_id, keys.next))
        return due

    def confirm_key(self, node_id: int, key: NodeKey, *, has_it: bool) -> None:
        """The node has the key, which is in use from now on; or it is to be told of another one later."""
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
        """For a tenant, whose credential is good for another `left_s`. b"" for a node without a key.

        Numbers go by the bearer without its certificate: nodes find in the ticket itself whether that is revoked.
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
        """For another node, to read these blocks at node `source`. b"" for a node without a key."""
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
        """Those who have been given tickets, but for the revoked."""
        return list(self._numbers)

    def revoke(self, bearer: Identity, now_ns: int) -> int:
        """What he has shown is good no more: its number, which nodes are to be told."""
        number = self._numbers.pop(bearer)
        # From the front only: to look at all that is remembered for each of thousands that end in one second would take the loop minutes.
        while self._revoked and (len(self._revoked) >= MAX_REVOKED or self._oldest().is_over(now_ns)):
            del self._revoked[next(iter(self._revoked))]
        self._revoked[bearer.name, number] = _Revoked(now_ns + self._ticket_ttl_ns, set(self._nodes))
        for keys in self._nodes.values():
            keys.tickets.pop(bearer, None)
        return number

    def _oldest(self) -> _Revoked:
        return next(iter(self._revoked.values()))

    def confirm_revoked(self, node_id: int, tenant: str, numbers: Collection[int]) -> None:
        """The node has said that it knows that these are revoked."""
        for number in numbers:
            if (tenant, number) in self._revoked:
                self._revoked[tenant, number].unconfirmed.discard(node_id)

    def revoked(self) -> dict[str, list[int]]:
        """What was revoked and some node may not know, by tenant: for one that comes back."""
        found: dict[str, list[int]] = {}
        for tenant, number in sorted(self._revoked):
            found.setdefault(tenant, []).append(number)
        return found
