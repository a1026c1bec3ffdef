"""Certificate authority for trying out TLS (`kvstore certs`), and for tests.

In production use an existing one (cert-manager, Vault, step-ca); docs/security.md lists the requirements on
certificates.
"""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.security.tls.subjects import MASTER, CertificateSubject

CA_CERT: Final = "ca.pem"
CA_KEY: Final = "ca.key"
EARLIER: Final = datetime.timedelta(minutes=5)
"""Validity before the creation of a certificate, because clocks of hosts differ."""
DEFAULT_DAYS: Final = 90
MAX_URI: Final = 1024
CA_DAYS: Final = 3650


@dataclass(frozen=True, slots=True)
class ValidityPeriod:
    """Validity of a certificate: begin and end, in UTC."""

    begin: datetime.datetime
    end: datetime.datetime

    @classmethod
    def from_now(cls, days: float) -> "ValidityPeriod":
        now = datetime.datetime.now(datetime.UTC)
        return cls(now - EARLIER, now + datetime.timedelta(days=days))


def make_authority(folder: Path, *, days: float = CA_DAYS) -> None:
    """Create ca.pem and ca.key in `folder`, which is created too.

    Raises ConfigError: one exists, or cannot be written.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvstore authority")])
    valid = ValidityPeriod.from_now(days)
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    made = (
        _builder(name, name, key, valid)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}") from None
    _write_pair(folder / CA_CERT, made, folder / CA_KEY, key)


def issue(
    folder: Path, file: str, subjects: Sequence[CertificateSubject], hosts: Sequence[str] = (), *, valid: ValidityPeriod | None = None
) -> tuple[Path, Path]:
    """Create FILE.pem and FILE.key in `folder`, signed by its authority, and return their paths.

    `hosts`: names and addresses of the subject; without any the certificate is for connecting only. Raises ConfigError:
    no authority there, or a file exists; InvalidArgument: a host or name that a certificate cannot have.
    """
    authority, authority_key = _authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, file[:64])])
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if hosts or any(subject.kind == MASTER for subject in subjects):
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    names = [*(x509.UniformResourceIdentifier(_uri(subject)) for subject in subjects), *map(_host, hosts)]
    made = (
        _builder(authority.subject, name, key, valid or ValidityPeriod.from_now(DEFAULT_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    cert, private = folder / f"{file}.pem", folder / f"{file}.key"
    _write_pair(cert, made, private, key)
    return cert, private


def _builder(issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePrivateKey, valid: ValidityPeriod) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(valid.begin)
        .not_valid_after(valid.end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        made = x509.load_pem_x509_certificate((folder / CA_CERT).read_bytes())
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder} has no usable authority ({error}): create one with `kvstore certs init {folder}`") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{folder / CA_KEY} is not an elliptic-curve key: create one with `kvstore certs init`")
    return made, key


def _uri(subject: CertificateSubject) -> str:
    uri = subject.uri()
    if len(uri) > MAX_URI:
        raise InvalidArgument(f"a name of {len(subject.name)} characters is too long for a certificate")
    return uri


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise InvalidArgument(f"{host!r} is neither a host name in ASCII nor an address") from None


def _write_pair(cert: Path, made: x509.Certificate, private: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write both files or neither; the key is readable by its owner only."""
    for path in (cert, private):
        if path.exists():
            raise ConfigError(f"{path} exists: remove it first, or choose another name")
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    begun: list[Path] = []
    try:
        for path, content, mode in ((private, secret, 0o600), (cert, made.public_bytes(serialization.Encoding.PEM), 0o644)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            begun.append(path)
            with open(descriptor, "wb") as file:
                file.write(content)
    except OSError as error:
        for one in begun:  # else the next try would fail
            one.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
