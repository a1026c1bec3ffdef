"""TLS socket with the interface of a plain socket, including vectors, flags and the kernel's timeouts.

The descriptor is non-blocking. A blocking call waits in poll, so that one thread can send while another receives, and
none waits with OpenSSL's lock. The first call that needs it runs the handshake. Two differences from a plain socket:

- After BlockingIOError from a send, the next send must begin with the same bytes, up to 16 KiB, of which OpenSSL has
  made a record.
- After a receive that filled every buffer, up to 16 KiB of a record may be decrypted and unread (`pending`), invisible
  to poll.
"""

import contextlib
import errno
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

from kvstore.protocol.errors import Untrusted
from kvstore.security.tls.pem_files import fingerprint_of
from kvstore.security.tls.refusals import not_tls_error, tls_error
from kvstore.security.tls.subjects import CertifiedPeer, names_of, peer_of

RECORD_BYTES: Final = 16 << 10
"""Largest record. Small buffers are joined up to it, because a record costs a header, a tag and two system calls."""
HANDSHAKE_BYTE: Final = b"\x16"
"""First byte of every TLS connection."""
READ: Final = int(select.POLLIN)
WRITE: Final = int(select.POLLOUT)
_TIMEVAL: Final = struct.Struct("@ll")
_LIMITS: Final = (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)

Check = Callable[[CertifiedPeer | None], None]
"""Called with the identity of the peer's verified certificate (None: none). Raises Untrusted."""
IsRevoked = Callable[[CertifiedPeer | None], bool]
"""Returns True if the peer's certificate is revoked now."""


class TlsSocket(ssl.SSLSocket):
    """TLS connection, made by `begin`. One thread may send while another receives."""

    _is_made = _is_ready = False
    _timeout_s: float | None = None
    _waits = False
    _peer_name = "the peer"
    _failure: Untrusted | None = None
    _retried: "bytes | memoryview | None" = None
    _has_begun = _begins_plainly = _is_encrypted = False
    reads_on: int = READ
    """Event that a blocked receive waits for: READ or WRITE."""
    sends_on: int = WRITE
    """Event that a blocked send waits for."""
    certified: CertifiedPeer | None = None
    """Identity of the peer's certificate after the handshake; None: no certificate."""
    _check: Check
    _is_revoked: IsRevoked | None
    _lock: threading.Lock
    _limits_s: dict[int, float]

    @classmethod
    def begin(
        cls,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        is_server: bool,
        host: str,
        peer: str,
        check: Check,
        is_revoked: IsRevoked | None = None,
    ) -> "TlsSocket":
        """Take ownership of a connected socket.

        `host`: required name or address in the server's certificate; "" if the context checks none. `peer`: name for
        errors. `is_revoked`: called after the handshake and for each record; None: no revocation. Raises OSError: the
        peer has closed the connection; the socket is closed then.
        """
        try:
            sock.settimeout(0.0)
            made = cast(
                TlsSocket,
                context.wrap_socket(sock, server_side=is_server, server_hostname=host or None, do_handshake_on_connect=False),
            )
        except BaseException:
            sock.close()
            raise
        made._lock, made._limits_s = threading.Lock(), dict.fromkeys(_LIMITS, 0.0)
        made._peer_name, made._check, made._is_revoked, made._is_made = peer, check, is_revoked, True
        return made

    # --- options, as of a plain socket ---

    def setblocking(self, flag: bool) -> None:
        self.settimeout(None if flag else 0.0)

    def settimeout(self, value: float | None) -> None:
        """None: calls block, up to SO_RCVTIMEO and SO_SNDTIMEO; 0: they do not block; else they time out after `value`
        seconds.
        """
        self._waits, self._timeout_s = value != 0.0, value or None
        super().settimeout(0.0)

    def setsockopt(self, level: int, option: int, value: Any, *more: Any) -> None:
        if level == socket.SOL_SOCKET and option in _LIMITS:
            seconds, micros = _TIMEVAL.unpack(value)
            self._limits_s[option] = seconds + micros / 1e6
        else:
            super().setsockopt(level, option, value, *more)

    # --- the handshake ---

    def shake_hands(self, timeout_s: float) -> None:
        """Finish the handshake within `timeout_s`. Raises Untrusted, TimeoutError, OSError."""
        end_s = time.monotonic() + timeout_s
        while not self.has_shaken_hands():
            if not self._poll(self.reads_on, end_s - time.monotonic()):
                raise TimeoutError(errno.ETIMEDOUT, f"no TLS handshake within {timeout_s:g} s")

    def has_shaken_hands(self) -> bool:
        """Advance the handshake without waiting.

        Return whether it is complete; if not, wait for `reads_on`. Raises Untrusted, OSError.
        """
        try:
            with self._lock:
                self._ensure_ready()
        except BlockingIOError:
            return False
        return True

    def _ensure_ready(self) -> None:
        """Advance the handshake; the caller holds the lock.

        Raises BlockingIOError (see `reads_on`), Untrusted, OSError.
        """
        if self._failure is not None:
            raise self._failure
        if self._is_ready:
            if self._is_revoked is not None and self._is_revoked(self.certified):  # Untrusted is for handshakes only
                raise ConnectionAbortedError(errno.ECONNABORTED, f"the certificate of {self._peer_name} has been revoked")
            return
        if self.server_side and not self._has_begun:
            self._look_at_first_byte()
        waits = self._waits, self._timeout_s
        try:
            self.do_handshake()
        except ssl.SSLError as error:
            raise self._translated(error, self._turn) from None
        finally:
            self._waits, self._timeout_s = waits  # do_handshake changes the timeout
        self._is_encrypted = True
        try:
            found = self.getpeercert()
            self.certified = peer_of(names_of(found), fingerprint_of(self.getpeercert(True) or b"")) if found else None
            self._check(self.certified)
            if self._is_revoked is not None and self._is_revoked(self.certified):
                raise Untrusted(f"the certificate of {self._peer_name} has been revoked (tls_revoked): use another one")
        except ValueError:
            self._failure = Untrusted(f"the certificate of {self._peer_name} has names that are not text: create another one")
            raise self._failure from None
        except Untrusted as error:
            self._failure = error
            raise
        self.reads_on, self.sends_on, self._is_ready = READ, WRITE, True

    def _look_at_first_byte(self) -> None:
        first = socket.socket.recv(self, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        self._has_begun = bool(first)
        if first and first != HANDSHAKE_BYTE:
            self._failure = not_tls_error(self._peer_name)
            self._begins_plainly = True
            raise self._failure

    @property
    def peer_name(self) -> str:
        """The peer's name in errors."""
        return self._peer_name

    def send_refusal(self, data: bytes) -> None:
        """Send `data` to a refused peer, as far as its socket takes it now.

        In plain text to a peer without TLS, encrypted after a complete handshake; otherwise nothing, as a TLS alert was
        sent.
        """
        with contextlib.suppress(OSError):
            if self._begins_plainly:
                socket.socket.send(self, data)
            elif self._is_encrypted:
                with self._lock:
                    super().send(data)

    def discard(self) -> int | None:
        """Discard bytes received after a failed handshake.

        Return how many, 0 at the end of the stream, None if none arrived.
        """
        try:
            return len(socket.socket.recv(self, RECORD_BYTES, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return None
        except OSError:
            return 0

    def _turn(self, waits_for: int) -> None:
        self.reads_on = self.sends_on = waits_for

    def _translated(self, error: ssl.SSLError, turn: Callable[[int], None]) -> OSError:
        """Return the error that a plain socket would raise, or Untrusted."""
        if isinstance(error, ssl.SSLWantReadError):
            turn(READ)
            return BlockingIOError(errno.EAGAIN, "nothing was received")
        if isinstance(error, ssl.SSLWantWriteError):
            turn(WRITE)
            return BlockingIOError(errno.EAGAIN, "the peer does not read")
        if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return ConnectionResetError(
                errno.ECONNRESET, "the peer closed the connection" + ("" if self._is_ready else " in the TLS handshake: see its log")
            )
        self._failure = tls_error(error, self._peer_name)
        return self._failure

    # --- receiving ---

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        view = memoryview(buffer)
        return self._receive((view[:nbytes] if nbytes else view,), flags)

    def recvmsg_into(self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0) -> tuple[int, list[Any], int, Any]:  # type: ignore[override]
        return self._receive([memoryview(buffer) for buffer in buffers], flags), [], 0, None

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """With MSG_PEEK, return raw bytes, or a placeholder byte if some are decrypted: only whether anything arrived
        is meaningful.
        """
        if flags & socket.MSG_PEEK:
            return b"\0" if self.pending() else socket.socket.recv(self, buflen, flags)
        if not self._is_made:  # called by the constructor if the peer has closed already; the handshake reports it
            return b""
        buffer = bytearray(buflen)
        return bytes(buffer[: self.recv_into(buffer, 0, flags)])

    def pending(self) -> int:
        """Return the number of decrypted unread bytes, which are invisible to poll."""
        return super().pending() if self._is_ready and self.fileno() >= 0 else 0

    def _receive(self, views: Sequence[memoryview], flags: int) -> int:
        """Fill `views` with available bytes, or with MSG_WAITALL completely.

        Return how many; 0 at the end of the stream.
        """
        moved = of_record = 0
        waits, is_all = self._waits and not flags & socket.MSG_DONTWAIT, bool(flags & socket.MSG_WAITALL)
        for view in views:
            while len(view):
                try:
                    got, left = self._read(view)
                except BlockingIOError:
                    if moved and not is_all:
                        return moved
                    if waits and self._poll(self.reads_on, self._timeout_s or self._limits_s[socket.SO_RCVTIMEO] or None):
                        continue
                    if moved:
                        return moved
                    raise self._over(waits) from None
                if not got:
                    return moved
                moved, of_record, view = moved + got, of_record + got, view[got:]
                if not left:
                    if of_record < RECORD_BYTES and not is_all:  # a full record is seldom the last
                        return moved
                    of_record = 0
        return moved

    def _read(self, view: memoryview) -> tuple[int, int]:
        """Receive into `view`. Return how many bytes, 0 at the end of the stream, and how many are left of the record.

        Raises BlockingIOError, Untrusted, OSError.
        """
        with self._lock:
            self._ensure_ready()
            try:
                got = super().recv_into(view, len(view))
            except ssl.SSLError as error:
                raise self._translated(error, self._turn_reads) from None
            return got, super().pending()

    def _turn_reads(self, waits_for: int) -> None:
        self.reads_on = waits_for

    # --- sending ---

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Iterable[Any], ancdata: Iterable[Any] = (), flags: int = 0, address: Any = None) -> int:  # type: ignore[override]
        """Send at least one byte and return how many; a blocking call sends all, unless it times out.

        `ancdata` must be empty.
        """
        left = [view for buffer in buffers if len(view := memoryview(buffer))]
        sent = 0
        while left:
            try:
                size = self._write(left)
            except BlockingIOError:
                if self._waits and self._poll(self.sends_on, self._timeout_s or self._limits_s[socket.SO_SNDTIMEO] or None):
                    continue
                if sent:
                    return sent
                raise self._over(self._waits) from None
            sent += size
            _drop(left, size)
        return sent

    def _write(self, views: list[memoryview]) -> int:
        """Send a record of `views`, or retry the current one.

        Return how many bytes. Raises BlockingIOError, Untrusted, OSError.
        """
        with self._lock:
            self._ensure_ready()
            part = self._retried if self._retried is not None else _record(views)
            try:
                size = super().send(part)
            except ssl.SSLError as error:
                self._retried = part
                raise self._translated(error, self._turn_sends) from None
            self._retried = None
            return size

    def _turn_sends(self, waits_for: int) -> None:
        self.sends_on = waits_for

    # --- waiting, the end ---

    def _poll(self, waits_for: int, timeout_s: float | None) -> bool:
        """Wait until the descriptor is ready or broken. Return False on timeout."""
        poller = select.poll()
        poller.register(self.fileno(), waits_for)
        return bool(poller.poll(None if timeout_s is None else max(timeout_s, 0) * 1000))

    def _over(self, waits: bool) -> OSError:
        """Return the error of a call that could not move any byte."""
        if waits and self._timeout_s is not None:
            return TimeoutError(errno.ETIMEDOUT, "timed out")
        return BlockingIOError(errno.EAGAIN, "nothing could be moved")

    def shutdown(self, how: int) -> None:
        """As of a plain socket: a blocked thread gets the end of the stream.

        Nothing is sent or received unencrypted afterwards.
        """
        socket.socket.shutdown(self, how)

    def close(self) -> None:
        """Close the socket and drop references to the caller's buffer and to the error, which refers to the socket."""
        self._retried = self._failure = None
        super().close()


def _record(views: list[memoryview]) -> "bytes | memoryview":
    """Return the beginning of `views` for one record: small views joined, a large one cut.

    Not more, because a partially sent buffer counts as unsent.
    """
    first = views[0]
    if len(views) == 1 or len(first) >= RECORD_BYTES:
        return first[:RECORD_BYTES]
    parts, left = [], RECORD_BYTES
    for view in views:
        parts.append(view[:left])
        left -= len(parts[-1])
        if not left:
            break
    return b"".join(parts)


def _drop(views: list[memoryview], size: int) -> None:
    """Drop the first `size` bytes."""
    while size and size >= len(views[0]):
        size -= len(views.pop(0))
    if size:
        views[0] = views[0][size:]
