"""A TLS connection that is used as the plain socket that it stands for: vectors, flags and the kernel's time limits included.

The descriptor never blocks. A caller that blocks waits in poll, so that one thread may send while another receives, and none waits with
OpenSSL's lock. The handshake is part of the first call that needs it. What a caller has to know:

- After BlockingIOError from a send the next one begins with the same bytes, up to 16 KiB: OpenSSL has made a record of them already.
- Of a record, up to 16 KiB, bytes may be left that no poll tells of (`pending`), but only where every buffer given was filled.
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
"""The most that one record carries. Small buffers are joined up to it: each record costs a header, a tag and two system calls."""
HANDSHAKE_BYTE: Final = b"\x16"
"""How every TLS connection begins."""
READ: Final = int(select.POLLIN)
WRITE: Final = int(select.POLLOUT)
_TIMEVAL: Final = struct.Struct("@ll")
_LIMITS: Final = (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)

Check = Callable[[CertifiedPeer | None], None]
"""Called with what the peer's certificate says (None: it showed none) once it is known to be genuine. Raises Untrusted."""
IsRevoked = Callable[[CertifiedPeer | None], bool]
"""Whether its certificate has been revoked by now."""


class TlsSocket(ssl.SSLSocket):
    """See the module. One thread may send while another receives; made by `begin`."""

    _is_made = _is_ready = False
    _timeout_s: float | None = None
    _waits = False
    _peer_name = "the peer"
    _failure: Untrusted | None = None
    _retried: "bytes | memoryview | None" = None
    _has_begun = _begins_plainly = _is_encrypted = False
    reads_on: int = READ
    """What a receive that could not go on waits for: the socket to be readable (READ), or writable (WRITE)."""
    sends_on: int = WRITE
    """The same of a send."""
    certified: CertifiedPeer | None = None
    """Who is there, once the handshake is over; None: it showed no certificate."""
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
        """Take over a connected socket. `host`: the name or address that the server's certificate must have; "" where the context checks
        none. `peer` is for errors. `is_revoked` is asked after the handshake and with each record from then on: None, if nobody's is.
        Raises OSError: the peer has gone. The socket is closed then."""
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
        """None: calls wait, as long as SO_RCVTIMEO and SO_SNDTIMEO say; 0: they do not; else they wait for so long, and time out."""
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
        """Take the handshake as far as it goes without waiting: whether it is over; if not, `reads_on` says what to wait for. Raises
        Untrusted, OSError."""
        try:
            with self._lock:
                self._ensure_ready()
        except BlockingIOError:
            return False
        return True

    def _ensure_ready(self) -> None:
        """As much of the handshake as is possible now. Raises BlockingIOError (see `reads_on`), Untrusted, OSError. With the lock."""
        if self._failure is not None:
            raise self._failure
        if self._is_ready:
            if self._is_revoked is not None and self._is_revoked(self.certified):  # no Untrusted: that is what a handshake comes to
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
            self._waits, self._timeout_s = waits  # it sets the time limit anew
        self._is_encrypted = True
        try:
            found = self.getpeercert()
            self.certified = peer_of(names_of(found), fingerprint_of(self.getpeercert(True) or b"")) if found else None
            self._check(self.certified)
            if self._is_revoked is not None and self._is_revoked(self.certified):
                raise Untrusted(f"the certificate of {self._peer_name} has been revoked (tls_revoked): use another one")
        except ValueError:
            self._failure = Untrusted(f"the certificate of {self._peer_name} has names that are no text: make another one")
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
        """The peer's address, as errors have it."""
        return self._peer_name

    def send_refusal(self, data: bytes) -> None:
        """Send `data` to a peer that was refused, as far as its socket takes it now: plainly to one that does not speak TLS, encrypted to
        one that TLS itself has accepted. To any other nothing: an alert of TLS has told it why."""
        with contextlib.suppress(OSError):
            if self._begins_plainly:
                socket.socket.send(self, data)
            elif self._is_encrypted:
                with self._lock:
                    super().send(data)

    def discard(self) -> int | None:
        """Throw away what has come after the handshake failed: how many bytes, 0 at the end of the stream (or of the connection), None for
        nothing yet."""
        try:
            return len(socket.socket.recv(self, RECORD_BYTES, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return None
        except OSError:
            return 0

    def _turn(self, waits_for: int) -> None:
        self.reads_on = self.sends_on = waits_for

    def _translated(self, error: ssl.SSLError, turn: Callable[[int], None]) -> OSError:
        """What a plain socket would raise, or Untrusted."""
        if isinstance(error, ssl.SSLWantReadError):
            turn(READ)
            return BlockingIOError(errno.EAGAIN, "nothing has come")
        if isinstance(error, ssl.SSLWantWriteError):
            turn(WRITE)
            return BlockingIOError(errno.EAGAIN, "the peer does not read")
        if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return ConnectionResetError(
                errno.ECONNRESET, "the peer hung up" + ("" if self._is_ready else " in the TLS handshake: its log says why")
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
        """With MSG_PEEK: TLS's own bytes, or one of no meaning where some are decrypted: enough to tell whether anything came."""
        if flags & socket.MSG_PEEK:
            return b"\0" if self.pending() else socket.socket.recv(self, buflen, flags)
        if not self._is_made:  # while it is, of a peer that has gone already: the handshake will tell
            return b""
        room = bytearray(buflen)
        return bytes(room[: self.recv_into(room, 0, flags)])

    def pending(self) -> int:
        """Bytes that are decrypted and not taken: no poll tells of them."""
        return super().pending() if self._is_ready and self.fileno() >= 0 else 0

    def _receive(self, views: Sequence[memoryview], flags: int) -> int:
        """Fill `views` from the front: with what is there, or, with MSG_WAITALL, all. 0 at the end of the stream."""
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
                    if of_record < RECORD_BYTES and not is_all:  # what fills a record is seldom the last
                        return moved
                    of_record = 0
        return moved

    def _read(self, view: memoryview) -> tuple[int, int]:
        """Bytes into `view`, 0 at the end of the stream; and how many are left of the record. Raises BlockingIOError, Untrusted,
        OSError."""
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
        """At least one byte of what there is; how many. A caller that waits sends all of it, unless its time is over. Descriptors do not
        go by TLS: `ancdata` is empty."""
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
        """Send the front of `views`, or what has been begun of it; how many bytes. Raises BlockingIOError, Untrusted, OSError."""
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
        """Whether the descriptor is ready, or broken, within the time."""
        poller = select.poll()
        poller.register(self.fileno(), waits_for)
        return bool(poller.poll(None if timeout_s is None else max(timeout_s, 0) * 1000))

    def _over(self, waits: bool) -> OSError:
        """Of a call that found nothing to do, in its time if it waits."""
        if waits and self._timeout_s is not None:
            return TimeoutError(errno.ETIMEDOUT, "timed out")
        return BlockingIOError(errno.EAGAIN, "nothing could be moved")

    def shutdown(self, how: int) -> None:
        """As of a plain socket: a thread within a call finds the end of the stream, and nothing is ever sent or taken unencrypted."""
        socket.socket.shutdown(self, how)

    def close(self) -> None:
        """Lets go of what was to be sent again: its owner gives that memory back. And of what went wrong, which refers to the socket."""
        self._retried = self._failure = None
        super().close()


def _record(views: list[memoryview]) -> "bytes | memoryview":
    """The front of `views`, as much as one record carries: small ones joined, a large one as it is. Not more at once: of what is begun
    nothing counts as sent before all of it is."""
    first = views[0]
    if len(views) == 1 or len(first) >= RECORD_BYTES:
        return first[:RECORD_BYTES]
    parts, room = [], RECORD_BYTES
    for view in views:
        parts.append(view[:room])
        room -= len(parts[-1])
        if not room:
            break
    return b"".join(parts)


def _drop(views: list[memoryview], size: int) -> None:
    """Forget the first `size` bytes."""
    while size and size >= len(views[0]):
        size -= len(views.pop(0))
    if size:
        views[0] = views[0][size:]
