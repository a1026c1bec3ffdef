"""Sessions of authenticated peers, for operators, and the files of tokens, certificates and quotas.

Files are read again when they change, or at SIGHUP, without a restart. An invalid file is logged and changes
nothing. Sessions whose token is no longer valid are closed. The loop is the only caller."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvstore.master.audit_trail import AuditTrail, Change
from kvstore.master.server.client_frames import ClientPeer
from kvstore.master.server.node_frames import NodePeer
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.server import Server
from kvstore.rpc.server.session import Session
from kvstore.security.actor import FILE, Actor, kind_of
from kvstore.security.authenticator import Authenticator
from kvstore.security.identity import Identity, Role
from kvstore.security.quotas.limits import QuotasInForce
from kvstore.security.tls.certificates import Certificates

MAX_TABLE: Final = 1000
"""Sessions of one message: it fits gRPC's 4 MiB."""


class PeerSessions:
    """Sessions of authenticated clients and nodes."""

    def __init__(self, server: Server, reactor: Reactor, trail: AuditTrail) -> None:
        self._server = server
        self._reactor = reactor
        self._trail = trail

    def tables(self, master: str) -> list[pb.SessionTable]:
        """Return all sessions, the newest last. `master` is this master's name."""
        now_ns = self._reactor.now_ns()
        rows = [_row(session, now_ns, master) for session in sorted(self._known(), key=lambda one: one.number)]
        return [pb.SessionTable(sessions=rows[begin : begin + MAX_TABLE]) for begin in range(0, len(rows), MAX_TABLE)]

    def end(self, number: int, by: Actor) -> None:
        """Close a session. Raises InvalidArgument for an unknown number."""
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
    identity, name = _identity_and_name(session)
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


def _identity_and_name(session: Session) -> tuple[Identity, str]:
    """Return the peer's identity, and its tenant or node name."""
    peer: ClientPeer | NodePeer = session.context
    return peer.identity, peer.tenant if isinstance(peer, ClientPeer) else peer.name


def _shown(session: Session) -> str:
    identity, name = _identity_and_name(session)
    return f"{kind_of(identity)} {name or '(none)'} at {session.peer()}"


def token_tables(identities: Sequence[Identity]) -> list[pb.TokenTable]:
    """Return tokens by kind and name, without secrets."""
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


READER: Final = Actor("master", via=FILE)
MAX_NAMED: Final = 10

log = logging.getLogger("kvstore.master")


class PermissionFiles:
    """Files of tokens, certificates and quotas. The master's loop is the only caller."""

    def __init__(
        self,
        authenticator: Authenticator,
        quotas: QuotasInForce,
        tls: Certificates | None,
        server: Server,
        trail: AuditTrail,
        reactor: Reactor,
    ) -> None:
        """`server` has the sessions. `trail` records the changes, in the thread of `reactor`."""
        self._trail = trail
        self._reactor = reactor
        self._authenticator = authenticator
        self._quotas = quotas
        self._tls = tls
        self._server = server
        if tls is not None:
            tls.on_changed = self._certificates_changed

    def reread(self) -> None:
        """Read all files, changed or not."""
        self._reread_credentials()
        self._reread_quotas()

    def _certificates_changed(self, error: ConfigError | None) -> None:
        """Thread-safe."""
        change = Change(READER, "certificates_reload", "tls_ca, tls_cert, tls_key, tls_revoked")
        self._reactor.call_soon(lambda: self._trail.failed(change, error) if error is not None else self._trail.done(change))

    def check_quotas(self) -> None:
        """Read the quotas file again if it has changed."""
        if self._quotas.has_changed():
            self._reread_quotas()

    def _reread_quotas(self) -> None:
        former, change = self._quotas.now, Change(READER, "quotas_reload", "quotas file")
        try:
            now = self._quotas.reread()
        except ConfigError as error:
            self._trail.failed(change, error)
            return
        if now != former:
            named = sorted(name for name in former.tenants.keys() | now.tenants.keys() if former.of(name) != now.of(name))
            names = [*(["default"] if former.default != now.default else []), *named]
            self._trail.done(replace(change, detail=f"changed: {shortened(names)}"))

    def check_credentials(self) -> None:
        """Read the tokens file again if it has changed, and close sessions with expired tokens."""
        if self._authenticator.has_changed():
            self._reread_credentials()
        else:
            self._check_sessions()

    def _reread_credentials(self) -> None:
        """New connections use the new certificates."""
        if self._tls is not None:
            self._tls.reload()
        change = Change(READER, "tokens_reload", "tokens file")
        former = self._authenticator.identities()
        try:
            self._authenticator.reread()
        except ConfigError as error:
            self._trail.failed(change, error)
        else:
            now = self._authenticator.identities()
            if former != now:
                gone, come = sorted(map(str, former - now)), sorted(map(str, now - former))
                detail = f"added: {shortened(come)}; removed: {shortened(gone)}"
                self._trail.done(replace(change, old=f"{len(former)} tokens", new=f"{len(now)} tokens", detail=detail))
        self._check_sessions()

    def _check_sessions(self) -> None:
        """Close sessions whose token was removed or has expired."""
        if self._authenticator.allows_anonymous:
            return
        for session in list(self._server.sessions):
            peer = session.context
            if isinstance(peer, ClientPeer | NodePeer) and not self._authenticator.holds(peer.identity):
                log.info("closing a session of %s: its token is no longer valid", peer.identity)
                session.close("its token is no longer valid")


def shortened(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return (", ".join(names[:MAX_NAMED]) or "none") + more
