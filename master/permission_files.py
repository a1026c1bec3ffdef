"""The files that say who may do what at a master, and how much: read again when they change, or at SIGHUP, without a restart.

Sessions of who is known no more end. A bad file changes nothing, but for the log.
"""

import logging

from kvstore.master.frames.clients import ClientPeer
from kvstore.master.frames.nodes import NodePeer
from kvstore.rpc.server import Server
from kvstore.security.guard import Guard
from kvstore.security.quotas.in_force import QuotasInForce
from kvstore.security.tls.certificates import Certificates

log = logging.getLogger("kvstore.master")


class PermissionFiles:
    """Of tokens, certificates and quotas. The master's loop is the only caller."""

    def __init__(self, guard: Guard, quotas: QuotasInForce, tls: Certificates | None, server: Server) -> None:
        """The sessions are `server`'s."""
        self._guard = guard
        self._quotas = quotas
        self._tls = tls
        self._server = server

    def reread(self) -> None:
        """All of them, whatever became of them."""
        self._reread_credentials()
        self._quotas.reread()

    def look_at_quotas(self) -> None:
        """Now and then: the file may have changed."""
        if self._quotas.has_changed():
            self._quotas.reread()

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
        self._guard.reread_loudly()
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
