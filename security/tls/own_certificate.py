"""Verification of a program's own certificate as its peers would: by in-memory handshakes with itself."""

import ssl
from dataclasses import dataclass

from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.refusals import tls_error
from kvstore.security.tls.subjects import CertificateSubject, CertifiedPeer, names_of, peer_of


@dataclass(frozen=True, slots=True)
class OwnRole:
    """Requirements on a program's certificate: its subject, and each host by which peers reach it."""

    subject: CertificateSubject
    hosts: tuple[str, ...] = ()


def own_certificate(server: ssl.SSLContext, client: ssl.SSLContext) -> CertifiedPeer:
    """Return the identity of the own certificate. `client` must not check host names.

    Raises ConfigError: peers with the same authorities would refuse it, as a server's or as a client's.
    """
    try:
        local = _shake_hands(server, client)
    except ssl.SSLError as error:
        raise ConfigError(f"tls_cert: {tls_error(error, 'this program')}") from None
    found = local.getpeercert()
    assert found, "a client context requires a certificate of the server"
    certified = peer_of(names_of(found))
    if not certified.subjects:
        raise ConfigError("tls_cert has no kvstore subject, such as kvstore://node/NAME: create it with `kvstore certs`")
    return certified


def check_role(own: CertifiedPeer, role: OwnRole, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Raises ConfigError: the certificate is for another program or host, and peers would refuse it.

    `client` checks host names.
    """
    kind = role.subject.kind
    if not own.is_a(kind, role.subject.name):
        raise ConfigError(
            f"tls_cert is for {own}, and {role.subject.uri()} is required: set the certificate of this {kind}, or create one "
            f"(kvstore certs {kind})"
        )
    for host in role.hosts:
        try:
            _shake_hands(server, client, host)
        except ssl.SSLError:
            raise ConfigError(
                f"tls_cert does not have {host}, by which peers reach this {kind}: create one that does (kvstore certs {kind} "
                f"--host {host}), or set advertise to a name that it has"
            ) from None


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str | None = None) -> ssl.SSLObject:
    """Return the client's end after the handshake. Raises SSLError: one end refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    local = client.wrap_bio(to_client, to_server, server_hostname=host)
    remote = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (local, remote, local, remote):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return local
