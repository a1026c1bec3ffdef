"""The TLS of one session, beside its frames: what epoll is to wait for, and how a peer is refused. It does not own the socket."""

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
"""What a peer may have sent, and still send, that was refused in the handshake."""
log = logging.getLogger("kvstore.transfer")


class TlsSession:
    """See the module. Not thread-safe: its session is the only caller."""

    def __init__(self, sock: TlsSocket) -> None:
        self._sock = sock
        self._left_bytes = MAX_REFUSED_BYTES
        self.is_refused = False

    @property
    def certified(self) -> CertifiedPeer | None:
        """Who is there, once the handshake is over."""
        return self._sock.certified

    def check_hello(self, hello: Hello) -> None:
        """Raises Unauthorized: the certificate is another's."""
        check_hello(self._sock.certified, hello)

    def wanted(self, events: int) -> int:
        """What epoll is to wait for, for a session that waits for these: TLS may have to send to receive, and to receive to send."""
        return (self._sock.reads_on if events & READABLE else 0) | (self._sock.sends_on if events & WRITABLE else 0)

    def turned(self, events: int, *, has_unsent: bool) -> int:
        """What these events of epoll mean for the session."""
        if events & WRITABLE and self._sock.reads_on == WRITABLE:
            events |= READABLE
        if events & READABLE and self._sock.sends_on == READABLE and has_unsent:
            events |= WRITABLE
        return events

    def has_unread(self) -> bool:
        """Something is decrypted and not taken, of which epoll does not tell."""
        return not self.is_refused and self._sock.pending() > 0

    def refuse(self, error: Untrusted) -> str:
        """The handshake came to nothing. Why the session is to be closed at once, or "": a peer that connected may have sent more already,
        and would lose the reason if the socket were closed with that unread. It hangs up once it has it (`is_over`), or its time as a
        stranger ends."""
        if not self._sock.server_side:
            return str(error)
        log.warning("refusing a connection: %s", error)
        failure = Failure(error.code, str(error).replace(self._sock.peer_name, "this side")).pack()
        self._sock.answer_refused(pack_header(Failure.TYPE, 0, len(failure)) + failure)
        self.is_refused = True
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as gone:
            return f"{gone.strerror or gone}"
        return ""

    def is_over(self) -> bool:
        """Whether a peer that was refused has hung up, or goes on for too long. Takes what it has sent."""
        got = self._sock.discard()
        self._left_bytes -= got or 0
        return got == 0 or self._left_bytes <= 0
