"""Frames of a master before its owner takes them: the Hello names a partition, whose owner gets the connection; a follower names the owner.

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

NOBODY: Final = "no master owns the catalog now"


def refusal(owner: CatalogOwner | None) -> Unavailable:
    """Why a master that does not own the catalog answers nothing else."""
    return Unavailable(f"this master stands by: ask {owner.address}") if owner else NoOwner(NOBODY)


class StandbyFrames:
    """The handler of a server whose master stands by. `owner` tells who owns the catalog, None for nobody."""

    def __init__(self, owner: Callable[[], CatalogOwner | None], reachable: MasterContactInfo, guard: Authenticator) -> None:
        self._owner = owner
        self._reachable = reachable
        self._guard = guard

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        message = MESSAGES.get(header.type)
        if message is not Hello:
            raise ProtocolError(f"a master takes no message of type {header.type}") if message is None else refusal(self._owner())
        hello = Hello.unpack(body)
        if hello.role == ROLE_CLIENT:
            self._guard.identify(hello.tenant, hello.token, client_identity(session.certified, hello.tenant, hello.token))
        elif hello.role == ROLE_NODE:
            self._guard.identify_node(hello.name, hello.token, node_identity(session.certified, hello.name))
        else:
            raise InvalidArgument(f"there is no role {hello.role}")
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

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        if header.type == Hello.TYPE and session not in self._handlers:  # who is known stays where he is
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
