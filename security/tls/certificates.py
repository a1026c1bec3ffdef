"""Certificates of a program: its own and its trusted authorities, reloaded when their files change; wraps sockets in
TLS.

Each new connection checks the files; there is no thread. An unusable file is logged, and the former content stays in
use. Open connections keep their context. With a list of revoked certificates they check the files, too, and end on
revocation.
"""

import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.config import ServerTlsSettings, TlsSettings
from kvstore.security.tls.own_certificate import OwnRole, check_role, own_certificate
from kvstore.security.tls.pem_files import load_pair, read_revoked
from kvstore.security.tls.subjects import CLIENT, MASTER, NODE, CertificateSubject, CertifiedPeer, check_has
from kvstore.security.tls.tls_socket import Check, TlsSocket

SERVERS: Final = (MASTER, NODE)
ANY_KIND: Final = (MASTER, NODE, CLIENT)
LOOK_INTERVAL_NS: Final = 1_000_000_000
"""Shortest time between checks of the files by open connections, one a record: a check takes 5 us."""
log = logging.getLogger("kvstore.security")


@dataclass(frozen=True, slots=True)
class Pems:
    """Contents of the files; b"" for one that is not set."""

    ca: bytes
    cert: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class _Current:
    pems: Pems
    client: ssl.SSLContext | None
    unnamed: ssl.SSLContext | None
    server: ssl.SSLContext | None
    own: CertifiedPeer | None
    """Subjects of the own certificate, if the program connects and serves."""
    revoked: frozenset[bytes]


class Certificates:
    """TLS contexts of a program, reloaded on changes. Thread-safe."""

    def __init__(self, settings: TlsSettings, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Raises ConfigError: a file is unusable, or one that another requires is missing."""
        if bool(settings.tls_cert) != bool(settings.tls_key):
            raise ConfigError("tls_cert and tls_key go together: set both, or neither")
        self._settings = settings
        self._requires = isinstance(settings, ServerTlsSettings) and settings.tls_require_client_cert
        if self._requires and settings.tls_cert and not settings.tls_ca:
            raise ConfigError(
                "tls_require_client_cert requires tls_ca, the authorities of clients: set it, or tls_require_client_cert=false"
            )
        self.on_changed: Callable[[ConfigError | None], None] = lambda _error: None
        """Called when files have changed: with None if they are in use, else with the error. In the thread that
        checked."""
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._role: OwnRole | None = None
        self._seen = self._signature()
        self._current = self._read()
        self._looked_ns = clock_ns()

    @classmethod
    def of(cls, settings: TlsSettings) -> "Certificates | None":
        """None where the settings name no TLS. Raises ConfigError."""
        if settings.tls_ca or settings.tls_cert or settings.tls_key:
            return cls(settings)
        if settings.tls_revoked:
            raise ConfigError("tls_revoked has no effect without tls_ca: set tls_ca too")
        return None

    @classmethod
    def of_peer(cls, settings: ServerTlsSettings, who: str) -> "Certificates | None":
        """As `of`, for a program (`who`) that connects and serves: TLS in both directions, or none.

        Raises ConfigError.
        """
        found = cls.of(settings)
        if found is not None and not (found.connects and found.serves):
            raise ConfigError(f"{who} connects and serves: for TLS set tls_ca, tls_cert and tls_key, all three")
        return found

    @property
    def connects(self) -> bool:
        """True if outgoing connections use TLS."""
        return bool(self._settings.tls_ca)

    @property
    def serves(self) -> bool:
        """True if accepted connections use TLS."""
        return bool(self._settings.tls_cert) and isinstance(self._settings, ServerTlsSettings)

    @property
    def revokes(self) -> bool:
        """True if a file of revoked certificates is set."""
        return bool(self._settings.tls_revoked)

    def is_revoked(self, peer: CertifiedPeer | None) -> bool:
        """Return True if the peer's certificate is revoked."""
        return peer is not None and self.names_revoked(peer.fingerprint)

    def names_revoked(self, fingerprint: bytes) -> bool:
        """Return True if the certificate with this fingerprint is revoked."""
        return self.revokes and fingerprint in self._now(LOOK_INTERVAL_NS).revoked

    @property
    def requires_client_cert(self) -> bool:
        return self._requires

    @property
    def subjects(self) -> tuple[CertificateSubject, ...]:
        """Subjects of the own certificate, of a program that connects and serves."""
        own = self._now().own
        assert own is not None, "this program does not both connect and serve"
        return own.subjects

    def require_role(self, role: OwnRole) -> None:
        """Require subject and hosts of the own certificate, now and after each reload. Raises ConfigError.

        No effect unless the program connects and serves.
        """
        self._role = role
        self._check_role(self._current)

    def _check_role(self, found: _Current) -> None:
        if self._role is not None and found.own is not None and found.server is not None and found.client is not None:
            check_role(found.own, self._role, found.server, found.client)

    def reload(self) -> None:
        """Have open connections check the files at once. Safe in a signal handler."""
        self._looked_ns -= LOOK_INTERVAL_NS

    def pems(self) -> Pems:
        """Return the current PEM contents, for libraries with their own contexts."""
        return self._now().pems

    # --- connections ---

    def connect(self, sock: socket.socket, host: str, timeout_s: float) -> TlsSocket:
        """Return a TLS socket over the connected `sock` after the handshake, which blocks.

        For a program that `connects`.

        The server's certificate must have `host` and be a master's or node's. Raises Untrusted, TimeoutError, OSError;
        the socket is closed then.
        """
        made = self.begin_to(sock, host, SERVERS)
        try:
            made.shake_hands(timeout_s)
        except BaseException:
            made.close()
            raise
        return made

    def begin_to(self, sock: socket.socket, host: str, kinds: tuple[str, ...]) -> TlsSocket:
        """Return a TLS socket over `sock`, before the handshake with `host`.

        `kinds`: accepted kinds of the server's certificate.

        Raises OSError; the socket is closed then.
        """
        context = self._now().client
        assert context is not None, "this program connects without TLS"

        def check(peer: CertifiedPeer | None) -> None:
            assert peer is not None, "a client context requires a certificate of the server"
            check_has(peer, kinds, host)

        return self._begin(sock, context, is_server=False, host=host, peer=host, check=check)

    def begin_to_subject(self, sock: socket.socket, peer: str, check: Check) -> TlsSocket:
        """As `begin_to`, for a server identified by its certificate's subject instead of a host name.

        `check` raises Untrusted for another server.
        """
        context = self._now().unnamed
        assert context is not None, "this program connects without TLS"
        return self._begin(sock, context, is_server=False, peer=peer, check=check)

    def begin_from(self, sock: socket.socket) -> TlsSocket:
        """Return a TLS socket over an accepted connection, before the handshake. For a program that `serves`.

        A certificate of the peer must have a kvstore subject. Raises OSError: the peer has closed; the socket is closed
        then.
        """
        context = self._now().server
        assert context is not None, "this program serves without TLS"
        peer = _name(sock)

        def check(certified: CertifiedPeer | None) -> None:
            if certified is not None:
                check_has(certified, ANY_KIND, peer)

        return self._begin(sock, context, is_server=True, peer=peer, check=check)

    def _begin(
        self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool, peer: str, check: Check, host: str = ""
    ) -> TlsSocket:
        is_revoked = self.is_revoked if self.revokes else None
        return TlsSocket.begin(sock, context, is_server=is_server, host=host, peer=peer, check=check, is_revoked=is_revoked)

    # --- the files ---

    def _now(self, max_age_ns: int = 0) -> _Current:
        now_ns = self._clock_ns()
        if now_ns >= self._looked_ns + max_age_ns:
            with self._lock:
                self._looked_ns = now_ns
                self._look()
        return self._current

    def _look(self) -> None:
        try:
            found = self._signature()
            if found == self._seen:
                return
            self._seen = found  # also of unusable files, so that they are logged once
            self._current = self._read()
        except ConfigError as error:
            log.warning("the changed certificates cannot be used, the former stay in use: %s", error)
            self.on_changed(error)
        else:
            log.info("the certificates have changed and are in use")
            self.on_changed(None)

    def _files(self) -> dict[str, str]:
        settings = self._settings
        return {"tls_ca": settings.tls_ca, "tls_cert": settings.tls_cert, "tls_key": settings.tls_key}

    def _signature(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return a value that changes with the files. Raises ConfigError: one is missing."""
        found = []
        for name, file in {**self._files(), "tls_revoked": self._settings.tls_revoked}.items():
            try:
                status = os.stat(file) if file else None
            except OSError as error:
                raise ConfigError(f"{name}: cannot read {file}: {error.strerror}") from None
            found.append((status.st_ino, status.st_size, status.st_mtime_ns) if status is not None else None)
        return tuple(found)

    def _read(self) -> _Current:
        pems = Pems(*(_content(name, file) for name, file in self._files().items()))
        client = self._context(ssl.PROTOCOL_TLS_CLIENT) if self.connects else None
        unnamed = self._context(ssl.PROTOCOL_TLS_CLIENT, names=False) if self.connects else None
        server = self._context(ssl.PROTOCOL_TLS_SERVER) if self.serves else None
        own = own_certificate(server, unnamed) if server and unnamed else None
        found = _Current(pems, client, unnamed, server, own, read_revoked(self._settings.tls_revoked))
        self._check_role(found)
        return found

    def _context(self, protocol: int, *, names: bool = True) -> ssl.SSLContext:
        settings = self._settings
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.sslsocket_class = TlsSocket
        if protocol == ssl.PROTOCOL_TLS_CLIENT:
            context.check_hostname = names
        else:
            context.num_tickets = 0  # no resumption; and unrequested bytes of a server would count as a protocol error
            if settings.tls_ca:
                context.verify_mode = ssl.CERT_REQUIRED if self._requires else ssl.CERT_OPTIONAL
        try:
            if settings.tls_ca:
                context.load_verify_locations(settings.tls_ca)
        except (ssl.SSLError, OSError):
            raise ConfigError(f"tls_ca: {settings.tls_ca} holds no certificate in PEM form") from None
        if settings.tls_cert:
            load_pair(context, settings.tls_cert, settings.tls_key, settings="tls_cert and tls_key")
        return context


def _content(name: str, file: str) -> bytes:
    if not file:
        return b""
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {file}: {error.strerror}") from None


def _name(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except (OSError, ValueError):  # closed already, as the handshake will find, or no TCP
        return "the peer"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
