"""TLS part of a session: events for epoll, and refusal of peers in the handshake."""

import logging
import socket
from typing import Final

from kvstore.protocol.errors import Untrusted
from kvstore.protocol.frames import pack_header
from kvstore.protocol.session_messages import Failure, Hello
from kvstore.rpc.reactor import READABLE, WRITABLE
from kvstore.security.tls.subjects import CertifiedPeer, check_hello
from kvstore.security.tls.tls_socket import TlsSocket

MAX_REFUSED_BYTES: Final = 256 << 10
"""Bytes read from a peer that was refused in the handshake."""
log = logging.getLogger("kvstore.transfer")


class TlsSession:
    """TLS state of one session, which owns the socket. Not thread-safe: only its session calls it."""

    def __init__(self, sock: TlsSocket) -> None:
        self._sock = sock
        self._left_bytes = MAX_REFUSED_BYTES
        self.is_refused = False

    @property
    def certified(self) -> CertifiedPeer | None:
        """Identity of the peer's certificate, after the handshake."""
        return self._sock.certified

    def check_hello(self, hello: Hello) -> None:
        """Raises Unauthorized: the certificate is for another tenant or node."""
        check_hello(self._sock.certified, hello)

    def wanted(self, events: int) -> int:
        """Return the events for epoll of a session that waits for these: TLS may have to send to receive, and the
        reverse.
        """
        return (self._sock.reads_on if events & READABLE else 0) | (self._sock.sends_on if events & WRITABLE else 0)

    def turned(self, events: int, *, has_unsent: bool) -> int:
        """Translate events of epoll into the session's."""
        if events & WRITABLE and self._sock.reads_on == WRITABLE:
            events |= READABLE
        if events & READABLE and self._sock.sends_on == READABLE and has_unsent:
            events |= WRITABLE
        return events

    def has_unread(self) -> bool:
        """Return True if decrypted bytes are unread, which epoll does not report."""
        return not self.is_refused and self._sock.pending() > 0

    def refuse(self, error: Untrusted) -> str:
        """Refuse the peer after a failed handshake.

        Return the reason to close the session at once, or "" to wait for the peer.

        Closing a socket with unread bytes would discard the error on its way to a connecting peer. The session waits
        until the peer closes (`is_over`), or `hello_timeout_s` passes.
        """
        if not self._sock.server_side:
            return str(error)
        log.warning("refusing a connection: %s", error)
        failure = Failure(error.code, str(error).replace(self._sock.peer_name, "this side")).pack()
        self._sock.send_refusal(pack_header(Failure.TYPE, 0, len(failure)) + failure)
        self.is_refused = True
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as gone:
            return f"{gone.strerror or gone}"
        return ""

    def is_over(self) -> bool:
        """Discard what a refused peer has sent.

        Return whether it has closed the connection or exceeded MAX_REFUSED_BYTES.
        """
        got = self._sock.discard()
        self._left_bytes -= got or 0
        return got == 0 or self._left_bytes <= 0
