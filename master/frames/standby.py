"""The frames of a master that stands by: who owns the catalog, and nothing else. The loop is the only caller."""

from collections.abc import Callable
from typing import Final

from kvstore.master.catalogs.interface import Owner
from kvstore.master.frames.service import Reachable
from kvstore.protocol.errors import InvalidArgument, NoOwner, ProtocolError, Unavailable
from kvstore.protocol.frames import Header
from kvstore.protocol.messages import MESSAGES
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, SERVER_MASTER, Hello, Welcome
from kvstore.rpc.session import Session
from kvstore.security.guard import Guard
from kvstore.security.tls.subjects import of_client, of_node

NOBODY: Final = "no master owns the catalog now"


def refusal(owner: Owner | None) -> Unavailable:
    """Why a master that does not own the catalog answers nothing else."""
    return Unavailable(f"this master stands by: ask {owner.address}") if owner else NoOwner(NOBODY)


class StandbyFrames:
    """The handler of a server whose master stands by. `owner` tells who owns the catalog, None for nobody."""

    def __init__(self, owner: Callable[[], Owner | None], reachable: Reachable, guard: Guard) -> None:
        self._owner = owner
        self._reachable = reachable
        self._guard = guard

    def frame(self, session: Session, header: Header, body: memoryview) -> None:
        message = MESSAGES.get(header.type)
        if message is not Hello:
            raise ProtocolError(f"a master takes no message of type {header.type}") if message is None else refusal(self._owner())
        hello = Hello.unpack(body)
        if hello.role == ROLE_CLIENT:
            self._guard.identify(hello.tenant, hello.token, of_client(session.certified, hello.tenant, hello.token))
        elif hello.role == ROLE_NODE:
            self._guard.identify_node(hello.name, hello.token, of_node(session.certified, hello.name))
        else:
            raise InvalidArgument(f"there is no role {hello.role}")
        owner = self._owner()
        if owner is None:
            raise refusal(owner)
        at = self._reachable
        welcome = Welcome(SERVER_MASTER, at.name, 0, 0, at.host_id, at.unix, at.control(session), owner.address, at.partitions)
        session.welcome(header.request_id, welcome)

    def payload(self, session: Session, header: Header, body: memoryview) -> list[memoryview] | None:
        raise ProtocolError("values go to nodes, not to the master")

    def closed(self, session: Session) -> None:
        return
