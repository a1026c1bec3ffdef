"""What a node remembers of one connection: who it is, and the put whose payload is arriving."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.protocol.errors import Denied, Unauthorized
from kvstore.protocol.message import BUSY
from kvstore.rpc.session import Session
from kvstore.security.identity import Identity, Kind
from kvstore.security.rules import NODE_FRAMES, allowed
from kvstore.security.tickets.form import fingerprint
from kvstore.store.blocks.block import Block
from kvstore.store.blocks.open_puts import OpenPut
from kvstore.store.blocks.slots_ahead import Page

MAX_SLABS = 64
"""Slabs named or passed in one message; the kernel passes at most 253 descriptors."""
MANY_SLABS: Final = 1024
"""A connection may remember so many before it is looked which of them are gone."""


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
    """All that it may read, as fingerprints (security/tickets/form.py); None: whatever is the tenant's."""
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
        self.allowed = allowed(NODE_FRAMES, self.identity)

    def forget_gone(self, has_slab: Callable[[int], bool]) -> None:
        """A connection may last for months, and no two slabs have one number. Called where it asks for more of them."""
        if len(self.exported) + len(self.pointed_at) > self.most_slabs:
            self.exported = set(filter(has_slab, self.exported))
            self.pointed_at = set(filter(has_slab, self.pointed_at))
            self.most_slabs = MANY_SLABS + 2 * (len(self.exported) + len(self.pointed_at))

    @property
    def is_node(self) -> bool:
        return self.identity.kind is Kind.NODE

    def check_blocks(self, keys: Sequence[bytes], generations: Sequence[int]) -> None:
        """Raises Denied unless it may read all of these."""
        if self.blocks is not None and not self.blocks.issuperset(map(fingerprint, keys, generations)):
            raise Denied("the pass of this node is for other blocks, or for others of their versions")


def peer_of(session: Session) -> Caller:
    """Raises Unauthorized for a connection that has not introduced itself."""
    if not isinstance(session.context, Caller):
        raise Unauthorized("say Hello first")
    return session.context
