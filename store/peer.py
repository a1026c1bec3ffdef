"""What a node remembers of one connection: who it is, and the put whose payload is arriving."""

from dataclasses import dataclass, field

from kvstore.protocol.errors import Unauthorized
from kvstore.store.open_puts import Put
from kvstore.transfer.session import Session


@dataclass(slots=True, eq=False)
class PutFrame:
    """A Put message whose payload is arriving: for each key its answer so far, or the open put that its bytes go to."""

    statuses: bytearray
    puts: list[Put | None]
    checksums: list[int]
    wait_seq: int = 0


@dataclass(slots=True, eq=False)
class Peer:
    """The context of a session after its Hello. `slabs` are descriptors to close once sent."""

    tenant: str
    role: int
    frame: PutFrame | None = None
    exported: set[int] = field(default_factory=set)


def peer_of(session: Session) -> Peer:
    """Raises Unauthorized for a connection that has not introduced itself."""
    if not isinstance(session.context, Peer):
        raise Unauthorized("say Hello first")
    return session.context
