"""TLS of gRPC, which has contexts of its own: what its channels and servers are made with.

gRPC compares a server's certificate with the host that was asked for; it knows nothing of roles. Whom a master lets in is decided where the
call arrives (`caller`).
"""

import ssl
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import grpc

from kvstore.security.tls.certificates import Certificates, Pems
from kvstore.security.tls.pem_files import fingerprint_of
from kvstore.security.tls.subjects import CertifiedPeer, peer_of


def open_channel(place: str, tls: Certificates | None, options: Sequence[tuple[str, int]]) -> grpc.Channel:
    """A channel to `place` (HOST:PORT), with TLS where this program connects with it."""
    if tls is None or not tls.connects:
        return grpc.insecure_channel(place, options=options)
    pems = tls.pems()
    credentials = grpc.ssl_channel_credentials(pems.ca, pems.key or None, pems.cert or None)
    return grpc.secure_channel(place, credentials, options=options)


def add_port(server: grpc.Server, place: str, tls: Certificates | None) -> int:
    """Have `server` listen at `place`, with TLS where this program serves with it; the port. Certificates that change are taken with the
    next connection. Raises RuntimeError: the port cannot be had."""
    if tls is None or not tls.serves:
        return server.add_insecure_port(place)
    in_use = tls.pems()

    def changed() -> "grpc.ServerCertificateConfiguration | None":
        nonlocal in_use
        pems = tls.pems()
        if pems == in_use:
            return None
        in_use = pems
        return _configuration(pems)

    credentials = grpc.dynamic_ssl_server_credentials(
        _configuration(in_use),
        changed,  # type: ignore[arg-type]  # None says that nothing has changed
        require_client_authentication=tls.requires_client_cert,
    )
    return server.add_secure_port(place, credentials)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], root_certificates=pems.ca or None)


def caller(context: grpc.ServicerContext) -> CertifiedPeer | None:
    """Who calls, as its certificate says; None: it showed none."""
    told = cast("Mapping[str, Iterable[bytes]]", context.auth_context())
    if "x509_pem_cert" not in told:
        return None
    [pem] = told["x509_pem_cert"]
    names = (name.decode(errors="replace") for name in told.get("x509_subject_alternative_name", ()))
    return peer_of(names, fingerprint_of(ssl.PEM_cert_to_DER_cert(pem.decode())))
