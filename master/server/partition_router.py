"""Router of a master's connections: the Hello names a partition, whose owner gets the connection; a follower redirects
to the owner.

The loop is the only caller."""

from collections.abc import Callable
from typing import Final

from kvstore.master.catalogs.interface import CatalogOwner
from kvstore.master.server.frames_service import MasterContactInfo
from kvstore.protocol.errors import InvalidArgument, NoOwner, ProtocolError, Unavailable
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.messages import MESSAGES
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, SERVER_MASTER, Hello, Welcome
from kvstore.rpc.server.server import Server
from kvstore.rpc.server.session import Handler, Session
from kvstore.security.authenticator import Authenticator
from kvstore.security.tls.subjects import client_identity, node_identity

NO_OWNER: Final = "no master owns the catalog now"


def refusal(owner: CatalogOwner | None) -> Unavailable:
    """Return the error of a master that does not own the catalog."""
    return Unavailable(f"this master stands by: ask {owner.address}") if owner else NoOwner(NO_OWNER)


class StandbyFrames:
    """Frames handler of a follower. `owner` returns the current owner, or None."""

    def __init__(self, owner: Callable[[], CatalogOwner | None], reachable: MasterContactInfo, authenticator: Authenticator) -> None:
        self._owner = owner
        self._reachable = reachable
        self._authenticator = authenticator

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        message = MESSAGES.get(header.type)
        if message is not Hello:
            raise ProtocolError(f"a master takes no message of type {header.type}") if message is None else refusal(self._owner())
        hello = Hello.unpack(body)
        if hello.role == ROLE_CLIENT:
            self._authenticator.identify(hello.tenant, hello.token, client_identity(session.certified, hello.tenant, hello.token))
        elif hello.role == ROLE_NODE:
            self._authenticator.identify_node(hello.name, hello.token, node_identity(session.certified, hello.name))
        else:
            raise InvalidArgument(f"unknown role {hello.role} in Hello")
        owner = self._owner()
        if owner is None:
            raise refusal(owner)
        at = self._reachable
        welcome = Welcome(SERVER_MASTER, at.name, 0, 0, at.host_id, at.unix, at.control(session), owner.address, at.partitions)
        session.welcome(header.request_id, welcome)

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> list[memoryview] | None:
        raise ProtocolError("values go to nodes, not to the master")

    def closed(self, session: Session) -> None:
        return


DEPOSED: Final = "this master owns the catalog no longer"


class PartitionRouter:
    """Frames handler of a master's server. Passes each session to the handler of its partition."""

    def __init__(self, server: Server, serving: Callable[[int], Handler], count: int) -> None:
        """`serving` returns the current handler of one of `count` partitions."""
        self._server = server
        self._serving = serving
        self._count = count
        self._handlers: dict[Session, Handler] = {}
        """Handlers of sessions that an owner has authenticated: they stay until the session ends."""
        self._chosen: dict[Session, int] = {}
        """Partition of each session after its Hello."""
        server.handler, server.handler_of = self, self.handler_of

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        if header.type == Hello.TYPE and session not in self._handlers:  # an authenticated session keeps its partition
            self._choose(session, Hello.unpack(body).partition)
        handler = self.handler_of(session)
        handler.frame(session, header, body)
        if session.context is not None:
            self._handlers[session] = handler

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> list[memoryview] | None:
        return self.handler_of(session).payload(session, header, body)

    def closed(self, session: Session) -> None:
        handler = self.handler_of(session)
        self._handlers.pop(session, None)
        self._chosen.pop(session, None)
        handler.closed(session)

    def handler_of(self, session: Session) -> Handler:
        """Return the handler of this session."""
        return self._handlers.get(session) or self._serving(self._chosen.get(session, 0))

    def deposed(self, partition: int) -> None:
        """The partition has another owner: close the sessions of the former one. Sessions at a follower were only
        redirected."""
        for session in [session for session in self._handlers if self._chosen.get(session, 0) == partition]:
            session.close(DEPOSED)

    def _choose(self, session: Session, partition: int) -> None:
        """Raises InvalidArgument for an unknown partition."""
        if partition >= self._count:
            raise InvalidArgument(f"there is no partition {partition}: this cluster's key space has {self._count}")
        self._chosen[session] = partition
