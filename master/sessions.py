"""Connections for frames at a master, for operators: a list, and the end of one. The loop is the only caller."""

from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.master.audit.change import Change
from kvstore.master.audit.trail import AuditTrail
from kvstore.master.frames.clients import ClientPeer
from kvstore.master.frames.nodes import NodePeer
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server import Server
from kvstore.rpc.session import Session
from kvstore.security.actor import Actor, kind_of
from kvstore.security.identity import Identity, Role

MAX_TABLE: Final = 1000
"""Sessions of one message: it fits gRPC's 4 MiB."""


class Sessions:
    """Of peers that have introduced themselves."""

    def __init__(self, server: Server, reactor: Reactor, trail: AuditTrail) -> None:
        self._server = server
        self._reactor = reactor
        self._trail = trail

    def tables(self, master: str) -> list[pb.SessionTable]:
        """All of them, the newest last. `master` is this master's name."""
        now_ns = self._reactor.now_ns()
        rows = [_row(session, now_ns, master) for session in sorted(self._known(), key=lambda one: one.number)]
        return [pb.SessionTable(sessions=rows[begin : begin + MAX_TABLE]) for begin in range(0, len(rows), MAX_TABLE)]

    def end(self, number: int, by: Actor) -> None:
        """Close a connection. Raises InvalidArgument: there is none of that number."""
        session = next((one for one in self._known() if one.number == number), None)
        if session is None:
            error = InvalidArgument(f"there is no session {number}: `kvstore sessions` lists those that are open")
            self._trail.failed(Change(by, "session_end", f"session {number}"), error)
            raise error
        self._trail.done(Change(by, "session_end", f"session {number}", _shown(session)))
        session.close("an operator ended this session")

    def _known(self) -> Iterator[Session]:
        return (one for one in self._server.sessions if isinstance(one.context, ClientPeer | NodePeer))


def _row(session: Session, now_ns: int, master: str) -> pb.SessionStatus:
    identity, name = _who(session)
    return pb.SessionStatus(
        id=session.number,
        kind=kind_of(identity),
        name=name,
        role=identity.role.name.lower() if identity.role is not Role.NONE else "",
        credential=identity.credential,
        peer=session.peer(),
        age_s=(now_ns - session.since_ns) / 1e9,
        requests=session.requests,
        master=master,
    )


def _who(session: Session) -> tuple[Identity, str]:
    """Identity of the peer, and its tenant or the node's name."""
    peer: ClientPeer | NodePeer = session.context
    return peer.identity, peer.tenant if isinstance(peer, ClientPeer) else peer.name


def _shown(session: Session) -> str:
    identity, name = _who(session)
    return f"{kind_of(identity)} {name or '(none)'} at {session.peer()}"


def token_tables(identities: Sequence[Identity]) -> list[pb.TokenTable]:
    """Tokens by kind and name, without what would open anything."""
    ordered = sorted(identities, key=lambda one: (kind_of(one), one.name, one.credential))
    rows = [
        pb.TokenStatus(
            kind=kind_of(one),
            name=one.name,
            role=one.role.name.lower() if one.role is not Role.NONE else "",
            credential=one.credential,
            expires_s=one.expires_s if one.expires_s != float("inf") else None,
        )
        for one in ordered
    ]
    return [pb.TokenTable(tokens=rows[begin : begin + MAX_TABLE]) for begin in range(0, len(rows), MAX_TABLE)]
