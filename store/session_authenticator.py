"""Authentication of sessions: what a Hello shows is checked here, what a session may do is kept, and sessions whose right is over end.

A session is let in by a ticket and goes on when that has ended, for the master tells the node what is revoked. So it lives as long as the
node hears its master, and `ticket_grace_s` beyond that; one that a former master's ticket let in, which the present one can revoke by
tenant only, until that ticket ends. A pass of another node is for seconds, and its session with it. No frame costs a look at the clock.
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
"""Slabs named or passed in one message; the kernel passes at most 253 descriptors."""

MANY_SLABS: Final = 1024
"""A connection may remember so many before it is looked which of them are gone."""

MAX_REVOKED: Final = 65_536
"""Numbers of revoked credentials that are remembered: an operator revokes a few a day."""

log = logging.getLogger("kvstore.store")


@dataclass(slots=True, eq=False)
class PutFrame:
    """A Put message whose payload is arriving: for each key its answer so far, or the open put and the slot's memory for its bytes.

    `is_claim`: the writer reserved nothing, the node has to ask the master before the blocks become visible. With `is_kept` it does so
    afterwards.
    """

    is_claim: bool
    is_kept: bool
    statuses: bytearray
    puts: list[OpenPut | None]
    values: list[memoryview | None]
    checksums: Sequence[int]
    waits: list[Block]
    """Whose newest events are to be durable at their masters before it is answered."""

    def give_up(self) -> None:
        """Its puts are over: their keys are to be asked for again."""
        self.statuses = bytearray(status if put is None else BUSY for put, status in zip(self.puts, self.statuses, strict=True))
        self.puts, self.values = [None] * len(self.puts), [None] * len(self.values)


@dataclass(slots=True, eq=False)
class Caller:
    """The context of a session after its Hello: who it is, and what let it in. `exported` are the slabs that it has been told of for
    writing."""

    tenant: str
    identity: Identity
    until_ns: int = 0
    """When the ticket ends that it showed, by the node's clock."""
    issuer: str = ""
    """The master that issued it; "" where no tickets are needed."""
    credential: int = 0
    """Upon what it was issued, as tickets number it."""
    certificate: bytes = b""
    """Fingerprint of the certificate upon which it was issued; b"" where it was issued upon a token alone."""
    blocks: frozenset[int] | None = None
    """All that it may read, as fingerprints (security/tickets/ticket.py); None: whatever is the tenant's."""
    pointed_at: set[int] = field(default_factory=set)
    """Slabs in which blocks of these lie, as it was told."""
    frame: PutFrame | None = None
    page: Page | None = None
    """In which it is offered the slot of its next put, once it asked for one."""
    exported: set[int] = field(default_factory=set)
    most_slabs: int = MANY_SLABS
    """In both, before those that are gone are forgotten."""
    allowed: frozenset[int] = field(init=False)
    """The frames that it may say."""

    def __post_init__(self) -> None:
        self.allowed = allowed_frames(NODE_FRAMES, self.identity)

    def forget_gone(self, has_slab: Callable[[int], bool]) -> None:
        """A connection may last for months, and no two slabs have one number. Called where it asks for more of them."""
        if len(self.exported) + len(self.pointed_at) > self.most_slabs:
            self.exported = set(filter(has_slab, self.exported))
            self.pointed_at = set(filter(has_slab, self.pointed_at))
            self.most_slabs = MANY_SLABS + 2 * (len(self.exported) + len(self.pointed_at))

    @property
    def is_node(self) -> bool:
        return self.identity.kind is IdentityKind.NODE

    def check_blocks(self, keys: Sequence[bytes], generations: Sequence[int]) -> None:
        """Raises Denied unless it may read all of these."""
        if self.blocks is not None and not self.blocks.issuperset(map(fingerprint, keys, generations)):
            raise Denied("the pass of this node is for other blocks, or for others of their versions")


def peer_of(session: Session) -> Caller:
    """Raises Unauthorized for a connection that has not introduced itself."""
    if not isinstance(session.context, Caller):
        raise Unauthorized("say Hello first")
    return session.context


class SessionAuthenticator:
    """See the module. Not thread-safe: the node's loop is the only caller."""

    def __init__(
        self,
        *,
        clock_ns: Callable[[], int],
        grace_s: float,
        is_revoked: Callable[[bytes], bool] = lambda _fingerprint: False,
        on_revoked: Callable[[str], None] = lambda _tenant: None,
    ) -> None:
        """`grace_s`: see the setting `ticket_grace_s`. `is_revoked` says whether the node's `tls_revoked` names a certificate, by its
        fingerprint; `on_revoked` is called with the tenant whose sessions ended for that."""
        self._clock_ns = clock_ns
        self._grace_s = grace_s
        self._is_revoked = is_revoked
        self._on_revoked = on_revoked
        self._keyrings: dict[int, Keyring] = {}
        """By partition: its master's keys, and those of the ones before."""
        self._issuers: dict[int, str] = {}
        """By partition, the master of the link, or of the last one: tickets that others issued end on time."""
        self._unheard_ns: int | None = None
        """Since when the link is lost; None while there is one, and before the first."""
        self._sessions: dict[Session, Caller] = {}
        """All who were let in; without an issuer: where no tickets were needed."""
        self._revoked: dict[tuple[str, int], None] = {}
        self.node_id = 0
        self.master_epochs: dict[int, int] = {}
        """Of the masters that this node obeys, by partition."""
        self.needs_tickets: bool | None = None
        """None: no master has said so yet, and nobody is let in."""

    def __len__(self) -> int:
        """Sessions that were let in and are not over."""
        return len(self._sessions)

    # --- the master ---

    def registered(self, *, node_id: int, master_epoch: int, issuer: str, needs_tickets: bool, partition: int = 0) -> None:
        """The node has a link to the partition's master, `issuer`, under whom it is node `node_id`. Where tickets are needed, `add_key`
        follows. Clients have their tickets of partition 0's, and that one tells what is revoked."""
        if needs_tickets:
            self._end([session for session, caller in self._sessions.items() if not caller.issuer], "this cluster takes tickets by now")
        self.node_id, self.needs_tickets = node_id, needs_tickets
        self.master_epochs[partition], self._issuers[partition] = master_epoch, issuer
        if not partition:
            self._unheard_ns = None

    def add_key(self, key_id: int, secret: bytes, *, age_ms: int, partition: int = 0) -> None:
        """One more key that the master of the link issues tickets under."""
        keyring = self._keyrings.setdefault(partition, Keyring())
        keyring.add(key_id, secret, age_ms=age_ms, issuer=self._issuers.get(partition, ""), now_ns=self._clock_ns())

    def link_down(self, partition: int = 0) -> None:
        """Nobody tells the node what is revoked, if it is partition 0's link."""
        if not partition:
            self._unheard_ns = self._clock_ns()

    def revoke(self, tenant: str, credentials: Collection[int]) -> int:
        """End the sessions that these credentials of the tenant opened, and those of his that a former master's tickets did; how many."""
        for credential in credentials:
            self._revoked[tenant, credential] = None
        while len(self._revoked) > MAX_REVOKED:
            del self._revoked[next(iter(self._revoked))]
        ended = [
            session
            for session, caller in self._sessions.items()
            if caller.identity.name == tenant and (caller.credential in credentials or caller.issuer not in self._issuers.values())
        ]
        self._end(ended, "what it showed is revoked")
        return len(ended)

    # --- who comes ---

    def admit(self, session: Session, hello: Hello) -> Caller:
        """Who it is that said Hello; he is remembered until `forget`. Raises Unavailable (no master has been found, or none has been heard
        of for `ticket_grace_s`), StaleEpoch (another node obeys another master), Unauthorized, InvalidTicket among them."""
        if self.needs_tickets is None:
            raise Unavailable("this node has not found its master yet; try again")
        epoch = self.master_epochs.get(hello.partition, 0)
        if hello.role == ROLE_NODE and hello.epoch != epoch:
            raise StaleEpoch(f"node {hello.name!r} obeys a master of epoch {hello.epoch}, and this node one of {epoch}")
        if self.needs_tickets:
            caller = self._by_ticket(session, hello)
        else:
            caller = Caller(hello.tenant, Identity(IdentityKind.NODE, name=hello.name) if hello.role == ROLE_NODE else ANONYMOUS)
        self._sessions[session] = caller
        return caller

    def _by_ticket(self, session: Session, hello: Hello) -> Caller:
        if self._is_over():
            raise Unavailable(f"this node has not heard of its master for {self._grace_s:g} s (ticket_grace_s); try again")
        keyring = self._keyrings.get(hello.partition, Keyring())  # clients', who say none, have theirs of partition 0's master
        found = keyring.check(hello.ticket, node_id=self.node_id, now_ns=self._clock_ns())
        ticket = found.ticket
        if ticket.tenant != hello.tenant or (ticket.role == PASS) != (hello.role == ROLE_NODE):
            raise InvalidTicket(f"this ticket is not for what is asked with it: tenant {hello.tenant!r}")
        if (ticket.tenant, ticket.credential) in self._revoked:
            raise InvalidTicket("the token that this ticket was issued upon is revoked")
        if ticket.certificate and self._is_revoked(ticket.certificate):
            raise InvalidTicket("the certificate that this ticket was issued upon is revoked (tls_revoked): use another one")
        if ticket.role == PASS:
            identity = Identity(IdentityKind.NODE, name=hello.name)
            return Caller(hello.tenant, identity, until_ns=found.until_ns, issuer=found.issuer, blocks=ticket.blocks)
        identity = Identity(IdentityKind.TENANT, Role(ticket.role), ticket.tenant)
        return Caller(hello.tenant, identity, found.until_ns, found.issuer, ticket.credential, ticket.certificate)

    def forget(self, session: object) -> None:
        """The connection is gone."""
        self._sessions.pop(session, None)  # type: ignore[call-overload]

    # --- time ---

    def expire(self) -> None:
        """Once a second: end the sessions whose time is over."""
        if self._is_over():
            self._end(list(self._sessions), f"no master has been heard of for {self._grace_s:g} s (ticket_grace_s)")
            return
        now_ns = self._clock_ns()
        over = [
            session
            for session, caller in self._sessions.items()
            if caller.issuer and caller.until_ns <= now_ns and (caller.is_node or caller.issuer not in self._issuers.values())
        ]
        self._end(over, "its ticket has ended")
        self._end_revoked()

    def _end_revoked(self) -> None:
        """End sessions whose ticket was issued upon a certificate that is revoked by now, Unix sockets' among them: TLS ends those over
        TCP at which the certificate itself is shown."""
        certificates = {caller.certificate for caller in self._sessions.values() if caller.certificate}
        revoked = set(filter(self._is_revoked, certificates))
        ended = {session: caller.tenant for session, caller in self._sessions.items() if caller.certificate in revoked}
        self._end(list(ended), "its certificate is revoked")
        for tenant in set(ended.values()):
            self._on_revoked(tenant)

    def _is_over(self) -> bool:
        unheard_ns = self._unheard_ns
        return bool(self.needs_tickets) and unheard_ns is not None and self._clock_ns() - unheard_ns >= self._grace_s * 1e9

    def _end(self, sessions: Collection[Session], reason: str) -> None:
        if sessions:
            log.info("%d sessions end: %s", len(sessions), reason)
        for session in sessions:
            session.close(reason)
            self._sessions.pop(session, None)
