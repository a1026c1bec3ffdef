"""The settings of TLS, the same for every program: its own settings inherit them."""

from dataclasses import dataclass, fields
from typing import Any

from kvstore.protocol.settings import setting


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Of who connects. See docs/security.md."""

    tls_ca: str = setting(
        "",
        "PEM file of the authorities whose certificates are trusted. With it every connection over TCP is TLS; default: none is.",
        shared=True,
    )
    tls_cert: str = setting(
        "", "PEM file of this program's own certificate, and of those between it and the authority. Goes with tls_key.", shared=True
    )
    tls_key: str = setting("", "PEM file of the certificate's private key, for its owner's eyes only.", shared=True)
    tls_revoked: str = setting(
        "",
        "File of certificates that are refused though their authority vouches for them, a SHA-256 fingerprint a line; what was opened with "
        "one ends (docs/security.md).",
        shared=True,
    )


def has_tls(settings: TlsSettings) -> bool:
    """Whether any of them is set."""
    return bool(settings.tls_ca or settings.tls_cert or settings.tls_key or settings.tls_revoked)


def tls_values(settings: TlsSettings) -> dict[str, Any]:
    """Those of who connects, by name: for the settings of a client that a program makes."""
    return {field.name: getattr(settings, field.name) for field in fields(TlsSettings)}


@dataclass(frozen=True, slots=True)
class ServerTlsSettings(TlsSettings):
    """Of who is connected to as well."""

    tls_require_client_cert: bool = setting(
        True, "With tls_cert: whoever connects over TCP shows a certificate too (mutual TLS), one that tls_ca vouches for.", shared=True
    )
