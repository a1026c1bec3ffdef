"""Who comes to a master says which partition of the key space he is about, in his Hello; whoever serves that one has the rest.

The loop is the only caller.
"""

from collections.abc import Callable
from typing import Final

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import Header
from kvstore.protocol.session_messages import Hello
from kvstore.rpc.server import Server
from kvstore.rpc.session import Handler, Session

DEPOSED: Final = "this master owns the catalog no longer"


class Reception:
    """The handler of a master's server."""

    def __init__(self, server: Server, serving: Callable[[int], Handler], count: int) -> None:
        """Of `count` partitions; `serving` gives who serves one of them now."""
        self._server = server
        self._serving = serving
        self._count = count
        self._handlers: dict[Session, Handler] = {}
        """Of sessions that are known to one that serves as an owner: it has them until they end."""
        self._chosen: dict[Session, int] = {}
        """The partition of a session that has said Hello."""
        server.handler, server.handler_of = self, self.handler_of

    def frame(self, session: Session, header: Header, body: memoryview) -> None:
        if header.type == Hello.TYPE and session not in self._handlers:  # who is known stays where he is
            self._choose(session, Hello.unpack(body).partition)
        handler = self.handler_of(session)
        handler.frame(session, header, body)
        if session.context is not None:
            self._handlers[session] = handler

    def payload(self, session: Session, header: Header, body: memoryview) -> list[memoryview] | None:
        return self.handler_of(session).payload(session, header, body)

    def closed(self, session: Session) -> None:
        handler = self.handler_of(session)
        self._handlers.pop(session, None)
        self._chosen.pop(session, None)
        handler.closed(session)

    def handler_of(self, session: Session) -> Handler:
        """Who serves this session."""
        return self._handlers.get(session) or self._serving(self._chosen.get(session, 0))

    def deposed(self, partition: int) -> None:
        """Another one serves the partition from now on: hang up on all who are known to the one before. Who asked the other master was
        told of the owner, and no more."""
        for session in [session for session in self._handlers if self._chosen.get(session, 0) == partition]:
            session.close(DEPOSED)

    def _choose(self, session: Session, partition: int) -> None:
        """Raises InvalidArgument for a partition that there is not."""
        if partition >= self._count:
            raise InvalidArgument(f"there is no partition {partition}: this cluster's key space has {self._count}")
        self._chosen[session] = partition
