"""Authentication of sessions: checks the ticket in a Hello, keeps what the session may do, and ends sessions that are
no longer valid.

- A client's session outlives its ticket, because the master reports revocations. It ends `ticket_grace_s` after the
  link to the master is lost.
- A session admitted by a former master's ticket ends with that ticket: the present master can revoke it by tenant only.
- A pass of another node is valid for seconds, and so is its session.

No clock is read per frame.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.protocol.errors import Denied, InvalidTicket, StaleEpoch, Unauthorized, Unavailable
from kvstore.protocol.message import BUSY
from kvstore.protocol.session_messages import ROLE_NODE, Hello
from kvstore.rpc.server.session import Session
from kvstore.security.identity import ANONYMOUS, Identity, IdentityKind, Role
from kvstore.security.permissions import NODE_FRAMES, allowed_frames
from kvstore.security.tickets.ticket import PASS, Keyring, fingerprint
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.free_slots import Page
from kvstore.store.block_table.open_puts import OpenPut

MAX_SLABS = 64
"""Slabs per message. The kernel passes at most 253 descriptors."""

MANY_SLABS: Final = 1024
"""Slabs that a connection remembers before unmapped ones are dropped."""

MAX_REVOKED: Final = 65_536
"""Revoked credentials that are remembered. An operator revokes a few a day."""

log = logging.getLogger("kvstore.store")


@dataclass(slots=True, eq=False)
class PutFrame:
    """Put message whose payload is arriving. Each key has its answer so far, or its open put and the slot's memory.

    `needs_commit`: the writer has no reservation, so the node asks the master before the blocks become visible.
    `is_kept`: it asks afterwards.
    """

    needs_commit: bool
    is_kept: bool
    statuses: bytearray
    puts: list[OpenPut | None]
    values: list[memoryview | None]
    checksums: Sequence[int]
    waits: list[Block]
    """Blocks whose newest events must be durable before the answer."""

    def give_up(self) -> None:
        """Drop the open puts; their keys are answered BUSY."""
        self.statuses = bytearray(status if put is None else BUSY for put, status in zip(self.puts, self.statuses, strict=True))
        self.puts, self.values = [None] * len(self.puts), [None] * len(self.values)


@dataclass(slots=True, eq=False)
class Caller:
    """Identity and rights of a session after its Hello. `exported` are the slabs that it may map for writing."""

    tenant: str
    identity: Identity
    until_ns: int = 0
    """End of its ticket, by the node's clock."""
    issuer: str = ""
    """Master that issued the ticket; "" without tickets."""
    credential: int = 0
    """Number of the credential that the ticket was issued for."""
    certificate: bytes = b""
    """Fingerprint of the certificate that the ticket was issued for; b"" for a token."""
    blocks: frozenset[int] | None = None
    """Fingerprints of the only blocks it may read (security/tickets/ticket.py); None: all of the tenant's."""
    pointed_at: set[int] = field(default_factory=set)
    """Slabs named in answers about `blocks`."""
    frame: PutFrame | None = None
    page: Page | None = None
    """Page in which its next slot ahead is offered."""
    exported: set[int] = field(default_factory=set)
    most_slabs: int = MANY_SLABS
    """Size of both sets at which unmapped slabs are dropped."""
    allowed: frozenset[int] = field(init=False)
    """Frame types that it may send."""

    def __post_init__(self) -> None:
        self.allowed = allowed_frames(NODE_FRAMES, self.identity)

    def forget_freed(self, has_slab: Callable[[int], bool]) -> None:
        """Drop slabs that were freed. Slab numbers are unique, and a connection may last for months. Called when it
        requests more."""
        if len(self.exported) + len(self.pointed_at) > self.most_slabs:
            self.exported = set(filter(has_slab, self.exported))
            self.pointed_at = set(filter(has_slab, self.pointed_at))
            self.most_slabs = MANY_SLABS + 2 * (len(self.exported) + len(self.pointed_at))

    @property
    def is_node(self) -> bool:
        return self.identity.kind is IdentityKind.NODE

    def check_blocks(self, keys: Sequence[bytes], generations: Sequence[int]) -> None:
        """Raises Denied unless it may read all of these blocks."""
        if self.blocks is not None and not self.blocks.issuperset(map(fingerprint, keys, generations)):
            raise Denied("the pass of this node does not cover the requested blocks in these generations: get a new pass from the master")


def peer_of(session: Session) -> Caller:
    """Return the session's caller. Raises Unauthorized before its Hello."""
    if not isinstance(session.context, Caller):
        raise Unauthorized("the connection is not authenticated: send Hello first")
    return session.context


class SessionAuthenticator:
    """Admits sessions and ends them. Not thread-safe: called from the node's loop."""

    def __init__(
        self,
        *,
        clock_ns: Callable[[], int],
        grace_s: float,
        is_revoked: Callable[[bytes], bool] = lambda _fingerprint: False,
        on_revoked: Callable[[str], None] = lambda _tenant: None,
    ) -> None:
        """`grace_s` is the setting `ticket_grace_s`. `is_revoked` tests a certificate's fingerprint against
        `tls_revoked`. `on_revoked` is called with the tenant whose sessions ended for that."""
        self._clock_ns = clock_ns
        self._grace_s = grace_s
        self._is_revoked = is_revoked
        self._on_revoked = on_revoked
        self._keyrings: dict[int, Keyring] = {}
        """By partition: ticket keys of the master and of former ones."""
        self._issuers: dict[int, str] = {}
        """By partition: the master of the current or last link. Sessions with tickets of other issuers end on time."""
        self._link_lost_ns: int | None = None
        """Time when the link was lost; None while it is up, and before the first."""
        self._sessions: dict[Session, Caller] = {}
        self._revoked: dict[tuple[str, int], None] = {}
        self.node_id = 0
        self.master_epochs: dict[int, int] = {}
        """By partition: the newest epoch seen of its masters."""
        self.needs_tickets: bool | None = None
        """None before the first registration: no session is admitted."""

    def __len__(self) -> int:
        """Number of admitted sessions."""
        return len(self._sessions)

    # --- the master ---

    def registered(self, *, node_id: int, master_epoch: int, issuer: str, needs_tickets: bool, partition: int = 0) -> None:
        """Record a registration with the partition's master `issuer` as node `node_id`. `add_key` follows if tickets
        are needed.

        Clients use the tickets of partition 0's master, which also reports revocations. Anonymous sessions end once
        tickets are needed.
        """
        if needs_tickets:
            self._end([session for session, caller in self._sessions.items() if not caller.issuer], "this cluster requires tickets now")
        self.node_id, self.needs_tickets = node_id, needs_tickets
        self.master_epochs[partition], self._issuers[partition] = master_epoch, issuer
        if not partition:
            self._link_lost_ns = None

    def add_key(self, key_id: int, secret: bytes, *, age_ms: int, partition: int = 0) -> None:
        """Add a key under which the master of the link issues tickets."""
        keyring = self._keyrings.setdefault(partition, Keyring())
        keyring.add(key_id, secret, age_ms=age_ms, issuer=self._issuers.get(partition, ""), now_ns=self._clock_ns())

    def link_down(self, partition: int = 0) -> None:
        """Record the loss of the link. Partition 0's starts the grace period."""
        if not partition:
            self._link_lost_ns = self._clock_ns()

    def revoke(self, tenant: str, credentials: Collection[int]) -> int:
        """End the tenant's sessions opened with these credentials, and those admitted by a former master's tickets.
        Return their number."""
        for credential in credentials:
            self._revoked[tenant, credential] = None
        while len(self._revoked) > MAX_REVOKED:
            del self._revoked[next(iter(self._revoked))]
        ended = [
            session
            for session, caller in self._sessions.items()
            if caller.identity.name == tenant and (caller.credential in credentials or caller.issuer not in self._issuers.values())
        ]
        self._end(ended, "its credential was revoked")
        return len(ended)

    # --- sessions ---

    def admit(self, session: Session, hello: Hello) -> Caller:
        """Authenticate a Hello and record the session until `forget`.

        Raises Unavailable (no master was found, or the link has been lost for `ticket_grace_s`), StaleEpoch (the other
        node has another master), Unauthorized or InvalidTicket.
        """
        if self.needs_tickets is None:
            raise Unavailable("this node has not found its master yet; try again")
        epoch = self.master_epochs.get(hello.partition, 0)
        if hello.role == ROLE_NODE and hello.epoch != epoch:
            raise StaleEpoch(f"node {hello.name!r} is registered under master epoch {hello.epoch}, this node under epoch {epoch}")
        if self.needs_tickets:
            caller = self._by_ticket(session, hello)
        else:
            caller = Caller(hello.tenant, Identity(IdentityKind.NODE, name=hello.name) if hello.role == ROLE_NODE else ANONYMOUS)
        self._sessions[session] = caller
        return caller

    def _by_ticket(self, session: Session, hello: Hello) -> Caller:
        if self._is_over():
            raise Unavailable(f"this node has had no link to its master for {self._grace_s:g} s (ticket_grace_s); try again")
        keyring = self._keyrings.get(hello.partition, Keyring())  # clients send no partition: 0
        found = keyring.check(hello.ticket, node_id=self.node_id, now_ns=self._clock_ns())
        ticket = found.ticket
        if ticket.tenant != hello.tenant or (ticket.role == PASS) != (hello.role == ROLE_NODE):
            raise InvalidTicket(f"the ticket is not valid for tenant {hello.tenant!r} in this role: get a new one from the master")
        if (ticket.tenant, ticket.credential) in self._revoked:
            raise InvalidTicket("the token of this ticket was revoked: use another token")
        if ticket.certificate and self._is_revoked(ticket.certificate):
            raise InvalidTicket("the certificate of this ticket is revoked (tls_revoked): use another one")
        if ticket.role == PASS:
            identity = Identity(IdentityKind.NODE, name=hello.name)
            return Caller(hello.tenant, identity, until_ns=found.until_ns, issuer=found.issuer, blocks=ticket.blocks)
        identity = Identity(IdentityKind.TENANT, Role(ticket.role), ticket.tenant)
        return Caller(hello.tenant, identity, found.until_ns, found.issuer, ticket.credential, ticket.certificate)

    def forget(self, session: object) -> None:
        """Remove a closed session."""
        self._sessions.pop(session, None)  # type: ignore[call-overload]

    # --- time ---

    def expire(self) -> None:
        """End sessions that are no longer valid. Called once a second."""
        if self._is_over():
            self._end(list(self._sessions), f"no link to the master for {self._grace_s:g} s (ticket_grace_s)")
            return
        now_ns = self._clock_ns()
        over = [
            session
            for session, caller in self._sessions.items()
            if caller.issuer and caller.until_ns <= now_ns and (caller.is_node or caller.issuer not in self._issuers.values())
        ]
        self._end(over, "its ticket expired")
        self._end_revoked()

    def _end_revoked(self) -> None:
        """End sessions whose ticket was issued for a revoked certificate, including those over Unix sockets. TLS ends
        TCP sessions that present the certificate itself."""
        certificates = {caller.certificate for caller in self._sessions.values() if caller.certificate}
        revoked = set(filter(self._is_revoked, certificates))
        ended = {session: caller.tenant for session, caller in self._sessions.items() if caller.certificate in revoked}
        self._end(list(ended), "its certificate is revoked")
        for tenant in set(ended.values()):
            self._on_revoked(tenant)

    def _is_over(self) -> bool:
        lost_ns = self._link_lost_ns
        return bool(self.needs_tickets) and lost_ns is not None and self._clock_ns() - lost_ns >= self._grace_s * 1e9

    def _end(self, sessions: Collection[Session], reason: str) -> None:
        if sessions:
            log.info("closing %d sessions: %s", len(sessions), reason)
        for session in sessions:
            session.close(reason)
            self._sessions.pop(session, None)
