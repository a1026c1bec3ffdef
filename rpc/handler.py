"""What a daemon does with its sessions, as they see it."""

from typing import TYPE_CHECKING, Protocol

from kvstore.protocol.frames import Header

if TYPE_CHECKING:
    from kvstore.rpc.session import Session


class Handler(Protocol):
    """All calls come from the reactor's thread.

    A KVStoreError raised by `frame` or `payload` is sent to the peer as Failure; anything else is a fault of ours: it is logged, and
    the peer told of an internal error.
    """

    def frame(self, session: "Session", header: Header, body: memoryview) -> None:
        """A whole request has arrived (its payload is in the memory that `payload` named). `body` is valid during the call only."""

    def payload(self, session: "Session", header: Header, body: memoryview) -> "list[memoryview] | None":
        """Where shall this request's payload go? Writable views that add up to it, or None: `session.accept_payload` will tell later,
        and `body` then is no longer valid; or the request has been served (`session.take_payload`). Raising refuses the request; its
        payload is read and thrown away."""

    def closed(self, session: "Session") -> None:
        """The connection is gone, for whatever reason; called once. Views given by `payload` are no longer used."""
