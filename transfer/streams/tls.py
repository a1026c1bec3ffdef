"""TLS over TCP as a Connection: the same blocking calls, decrypted straight into a slot.

A listener tells, with its address, what its certificate is for (kvstore://node/NAME). Who connects has that from the node itself or from
the master, and takes no other certificate: so the certificate need not name the addresses of all rails.
"""

import socket
from typing import Final

from kvstore.protocol.errors import ConfigError, KVStoreError, ProtocolError, Unreachable, Untrusted
from kvstore.rpc.address import Address, connect, parse_address
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.subjects import CertifiedPeer, peer_of
from kvstore.transfer.agent import Rail
from kvstore.transfer.streams.tcp import LOOPBACK, TcpConnection, TcpListener

MAGIC: Final = b"tls1 "
"""Metadata: this, URIs of subjects of the listener's certificate joined by commas, a space, then HOST:PORT; all in ASCII."""
MAX_METADATA_BYTES: Final = 4096


class TlsTransport:
    """Makes TcpConnections whose sockets speak TLS."""

    def __init__(self, tls: Certificates) -> None:
        self.transport = TcpConnection.transport  # for routes and rails they are alike
        self._tls = tls

    def listen(self, rail: Rail) -> "TlsListener":
        """As Connection.listen. Raises ConfigError too where this program has no certificate to be connected to with."""
        if not self._tls.serves:
            raise ConfigError("an engine that others connect to with TLS needs tls_cert and tls_key")
        return TlsListener(rail.address or LOOPBACK, rail.port, self._tls)

    def connect(self, metadata: bytes, rail: Rail, deadline: Deadline) -> TcpConnection:
        """As Connection.connect. A certificate that is refused, on either side, is Unreachable: another rail may lead there."""
        meant, address = _parse(metadata)
        try:
            sock = connect(address, timeout_s=deadline.left_s(), source=rail.address)
            made = self._tls.begin_to_subject(sock, str(address), lambda found: _check(found, meant, address))
            try:
                made.shake_hands(deadline.left_s())
            except BaseException:
                made.close()
                raise
        except Untrusted as error:
            raise Unreachable(f"cannot connect to {address} over {rail.device or 'the loopback'}: {error}") from None
        except KVStoreError:
            raise
        except TimeoutError:
            raise deadline.exceeded() from None
        except OSError as error:
            raise Unreachable(f"cannot connect to {address} over {rail.device or 'the loopback'}: {error.strerror or error}") from None
        return TcpConnection(made, str(address))


class TlsListener(TcpListener):
    """See Listener. The handshake is the accepted connection's: `accept` does not wait for it."""

    def __init__(self, host: str, port: int, tls: Certificates) -> None:
        super().__init__(host, port)
        self._tls = tls

    def metadata(self) -> bytes:
        subjects = ",".join(subject.uri() for subject in self._tls.subjects)
        return MAGIC + f"{subjects} {self.address}".encode()

    def _made(self, sock: socket.socket, peer: str) -> TcpConnection | None:
        try:
            return TcpConnection(self._tls.begin_from(sock), peer)
        except OSError:  # gone already
            return None


def _check(found: CertifiedPeer | None, meant: CertifiedPeer, address: Address) -> None:
    """Raises Untrusted unless one of the subjects told is the certificate's."""
    if found is None or not set(found.subjects) & set(meant.subjects):
        raise Untrusted(f"the certificate of {address} is for {found}, and {meant} was to be there")


def _parse(metadata: bytes) -> tuple[CertifiedPeer, Address]:
    """Raises ProtocolError for bytes that no TlsListener made."""
    subjects, space, address = metadata.removeprefix(MAGIC).partition(b" ")
    if not metadata.startswith(MAGIC) or not space or len(metadata) > MAX_METADATA_BYTES:
        raise ProtocolError("the peer's transfer engine does not speak TLS, and this one's does: give both tls_ca, tls_cert and tls_key")
    try:
        return peer_of(subjects.decode("ascii").split(",")), parse_address(address.decode("ascii"))
    except (ValueError, KVStoreError):
        raise ProtocolError("these bytes do not say how a TLS listener is reached") from None
