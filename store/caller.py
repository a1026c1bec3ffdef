"""What a node remembers of one connection: who it is, and the put whose payload is arriving."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.protocol.errors import Denied, Unauthorized
from kvstore.protocol.session_messages import ROLE_NODE
from kvstore.rpc.session import Session
from kvstore.store.blocks.open_puts import OpenPut

MAX_SLABS = 64
"""Slabs named or passed in one message; the kernel passes at most 253 descriptors."""


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
    wait_seq: int


@dataclass(slots=True, eq=False)
class Caller:
    """The context of a session after its Hello. `exported` are the slabs that it has been told of for writing."""

    tenant: str
    role: int
    frame: PutFrame | None = None
    exported: set[int] = field(default_factory=set)


def peer_of(session: Session) -> Caller:
    """Raises Unauthorized for a connection that has not introduced itself."""
    if not isinstance(session.context, Caller):
        raise Unauthorized("say Hello first")
    return session.context


def writer_of(session: Session) -> Caller:
    """As `peer_of`, for what only clients may do. Raises Denied for another node: its pass lets it read."""
    peer = peer_of(session)
    if peer.role == ROLE_NODE:
        raise Denied("a node may read another's blocks, and write none")
    return peer
