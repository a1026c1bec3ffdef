"""TLS settings, inherited by the settings of every program."""

from dataclasses import dataclass, fields
from typing import Any

from kvstore.protocol.settings import setting


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """TLS settings of a program that connects. See docs/security.md."""

    tls_ca: str = setting(
        "",
        "PEM file of trusted authorities. With it every outgoing TCP connection uses TLS; default: none does.",
        shared=True,
    )
    tls_cert: str = setting("", "PEM file of this program's certificate chain. Requires tls_key.", shared=True)
    tls_key: str = setting("", "PEM file of the certificate's private key, readable by its owner only.", shared=True)
    tls_revoked: str = setting(
        "",
        "File of revoked certificates, a SHA-256 fingerprint a line; connections that use one are closed (docs/security.md).",
        shared=True,
    )


def has_tls(settings: TlsSettings) -> bool:
    """Return True if any TLS setting is set."""
    return bool(settings.tls_ca or settings.tls_cert or settings.tls_key or settings.tls_revoked)


def tls_values(settings: TlsSettings) -> dict[str, Any]:
    """Return the client's TLS settings by name, for the settings of a client inside a program."""
    return {field.name: getattr(settings, field.name) for field in fields(TlsSettings)}


@dataclass(frozen=True, slots=True)
class ServerTlsSettings(TlsSettings):
    """TLS settings of a program that also serves."""

    tls_require_client_cert: bool = setting(
        True, "With tls_cert: peers over TCP need a certificate signed by tls_ca, too (mutual TLS).", shared=True
    )
