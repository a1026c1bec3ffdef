"""TLS credentials for gRPC channels and servers, which have their own contexts.

gRPC verifies the host name of a server's certificate, but no kvstore subjects; a master checks those for each call
(`caller`).
"""

import ssl
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import grpc

from kvstore.security.tls.certificates import Certificates, Pems
from kvstore.security.tls.pem_files import fingerprint_of
from kvstore.security.tls.subjects import CertifiedPeer, peer_of


def open_channel(target: str, tls: Certificates | None, options: Sequence[tuple[str, int]]) -> grpc.Channel:
    """Return a channel to `target` (HOST:PORT), with TLS if this program connects with it."""
    if tls is None or not tls.connects:
        return grpc.insecure_channel(target, options=options)
    pems = tls.pems()
    credentials = grpc.ssl_channel_credentials(pems.ca, pems.key or None, pems.cert or None)
    return grpc.secure_channel(target, credentials, options=options)


def add_port(server: grpc.Server, listen: str, tls: Certificates | None) -> int:
    """Have `server` listen at `listen` (HOST:PORT), with TLS if this program serves with it, and return the port.

    Changed certificates are used from the next connection on. Raises RuntimeError: the port is not available.
    """
    if tls is None or not tls.serves:
        return server.add_insecure_port(listen)
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
        changed,  # type: ignore[arg-type]  # None: unchanged
        require_client_authentication=tls.requires_client_cert,
    )
    return server.add_secure_port(listen, credentials)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], root_certificates=pems.ca or None)


def caller(context: grpc.ServicerContext) -> CertifiedPeer | None:
    """Return the identity of the caller's certificate, or None."""
    auth = cast("Mapping[str, Iterable[bytes]]", context.auth_context())
    if "x509_pem_cert" not in auth:
        return None
    [pem] = auth["x509_pem_cert"]
    names = (name.decode(errors="replace") for name in auth.get("x509_subject_alternative_name", ()))
    return peer_of(names, fingerprint_of(ssl.PEM_cert_to_DER_cert(pem.decode())))
