"""A program's own certificate, checked as its peers check it: by handshakes with itself, in memory."""

import ssl
from dataclasses import dataclass

from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.refusals import tls_error
from kvstore.security.tls.subjects import CertificateSubject, CertifiedPeer, names_of, peer_of


@dataclass(frozen=True, slots=True)
class OwnRole:
    """What the certificate of a program has to say: what the program is, and each host by which others reach it."""

    subject: CertificateSubject
    hosts: tuple[str, ...] = ()


def own_certificate(server: ssl.SSLContext, client: ssl.SSLContext) -> CertifiedPeer:
    """What the certificate is for. `client` checks no host's name. Raises ConfigError: peers that trust the same authorities would refuse
    it, at either end."""
    try:
        near = _shake_hands(server, client)
    except ssl.SSLError as error:
        raise ConfigError(f"tls_cert: {tls_error(error, 'this program')}") from None
    found = near.getpeercert()
    assert found, "a context for clients lets in no server without a certificate"
    certified = peer_of(names_of(found))
    if not certified.subjects:
        raise ConfigError("tls_cert: it is for nothing of kvstore's, such as kvstore://node/NAME: make it with `kvstore certs`")
    return certified


def check_role(own: CertifiedPeer, role: OwnRole, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """`client` checks the host's name. Raises ConfigError: the certificate is another program's, or another host's, so that clients and
    nodes would refuse this one."""
    kind = role.subject.kind
    if not own.is_a(kind, role.subject.name):
        raise ConfigError(
            f"tls_cert: it is for {own}, and one for {role.subject.uri()} is needed: name the certificate of this {kind}, or make one "
            f"(kvstore certs {kind})"
        )
    for host in role.hosts:
        try:
            _shake_hands(server, client, host)
        except ssl.SSLError:
            raise ConfigError(
                f"tls_cert: it does not name {host}, by which others reach this {kind}: make one that does (kvstore certs {kind}, with "
                f"--host {host}), or set advertise to a name that it has"
            ) from None


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str | None = None) -> ssl.SSLObject:
    """The client's end. Raises SSLError: one of them refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=host)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (near, far, near, far):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return near
