"""The files that say who may do what at a master, and how much: read again when they change, or at SIGHUP, without a restart.

Sessions of who is known no more end. A bad file changes nothing, but for the log.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvstore.master.audit.change import Change
from kvstore.master.audit.trail import AuditTrail
from kvstore.master.frames.clients import ClientPeer
from kvstore.master.frames.nodes import NodePeer
from kvstore.protocol.errors import ConfigError
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server import Server
from kvstore.security.actor import FILE, Actor
from kvstore.security.guard import Guard
from kvstore.security.quotas.limits import QuotasInForce
from kvstore.security.tls.certificates import Certificates

READER: Final = Actor("master", via=FILE)
MAX_NAMED: Final = 10

log = logging.getLogger("kvstore.master")


class PermissionFiles:
    """Of tokens, certificates and quotas. The master's loop is the only caller."""

    def __init__(
        self, guard: Guard, quotas: QuotasInForce, tls: Certificates | None, server: Server, trail: AuditTrail, reactor: Reactor
    ) -> None:
        """The sessions are `server`'s. `trail` gets what a changed file changes, in the thread of `reactor`."""
        self._trail = trail
        self._reactor = reactor
        self._guard = guard
        self._quotas = quotas
        self._tls = tls
        self._server = server
        if tls is not None:
            tls.on_changed = self._certificates_changed

    def reread(self) -> None:
        """All of them, whatever became of them."""
        self._reread_credentials()
        self._reread_quotas()

    def _certificates_changed(self, error: ConfigError | None) -> None:
        """In any thread."""
        change = Change(READER, "certificates_reload", "tls_ca, tls_cert, tls_key, tls_revoked")
        self._reactor.call_soon(lambda: self._trail.failed(change, error) if error is not None else self._trail.done(change))

    def look_at_quotas(self) -> None:
        """Now and then: the file may have changed."""
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

    def look_at_credentials(self) -> None:
        """Now and then: the file may have changed, and tokens come to their end."""
        if self._guard.has_changed():
            self._reread_credentials()
        else:
            self._look_at_sessions()

    def _reread_credentials(self) -> None:
        """Certificates are looked at with the next connection."""
        if self._tls is not None:
            self._tls.reload()
        change = Change(READER, "tokens_reload", "tokens file")
        former = self._guard.identities()
        try:
            self._guard.reread()
        except ConfigError as error:
            self._trail.failed(change, error)
        else:
            now = self._guard.identities()
            if former != now:
                gone, come = sorted(map(str, former - now)), sorted(map(str, now - former))
                detail = f"added: {shortened(come)}; removed: {shortened(gone)}"
                self._trail.done(replace(change, old=f"{len(former)} tokens", new=f"{len(now)} tokens", detail=detail))
        self._look_at_sessions()

    def _look_at_sessions(self) -> None:
        """End those whose token is gone, or has come to its end."""
        if self._guard.lets_everybody_in:
            return
        for session in list(self._server.sessions):
            peer = session.context
            if isinstance(peer, ClientPeer | NodePeer) and not self._guard.holds(peer.identity):
                log.info("%s is hung up on: its token is valid no more", peer.identity)
                session.close("its token is valid no more")


def shortened(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return (", ".join(names[:MAX_NAMED]) or "none") + more
