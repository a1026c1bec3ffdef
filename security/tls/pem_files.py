"""PEM files of TLS: certificate and key, list of revoked certificates, validity of certificates.

The file of `tls_revoked` has a SHA-256 fingerprint a line, as `openssl x509 -noout -fingerprint -sha256 -in FILE`
prints it, or its digits alone; `#` begins a comment. CRLs are not supported: an expired CRL would stop the
whole cluster, and gRPC's Python library accepts none.

Validity is parsed without an X.509 library: from the DER of each certificate down to its `validity`.
Source: RFC 5280, 4.1 (Certificate, TBSCertificate, Validity); X.690, 8.1 (tag, length, content).
"""

import binascii
import hashlib
import re
import ssl
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.protocol.errors import ConfigError
from kvstore.security.config_file import signature

ATTEMPTS: Final = 5
"""Attempts to read files that are replaced meanwhile; certificate and key may be one file, which is read twice."""
MAX_REVOKED_BYTES: Final = 4 << 20
"""Enough for 40,000 certificates; a larger file is a mistake."""
_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_COMMENT: Final = "#"
MAX_PEM_BYTES: Final = 1 << 20
_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _INTEGER, _UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x30, 0x02, 0x17, 0x18, 0xA0


def load_pair(context: ssl.SSLContext, cert: str, key: str, *, settings: str) -> None:
    """Load certificate and key into `context`.

    `settings`: names of their settings, for errors. Raises ConfigError: unusable.
    """
    attempt = 1
    while True:
        seen = signature(cert), signature(key)
        try:
            return context.load_cert_chain(cert, key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            if attempt == ATTEMPTS or (signature(cert), signature(key)) == seen:
                reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
                raise ConfigError(f"{settings}: {cert} and {key} are no certificate and its key in PEM ({reason.lower()})") from None
        attempt += 1


def _no_password() -> str:
    raise ValueError("the key is encrypted, and a daemon cannot prompt for the password")


def fingerprint_of(der: bytes) -> bytes:
    """Return a certificate's fingerprint: SHA-256 of its DER form."""
    return hashlib.sha256(der).digest()


def read_revoked(path: str) -> frozenset[bytes]:
    """Read the fingerprints of the file; empty for "". Raises ConfigError with the malformed line."""
    if not path:
        return frozenset()
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_REVOKED_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"tls_revoked: cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_REVOKED_BYTES:
        raise ConfigError(f"tls_revoked: {path} has more than {MAX_REVOKED_BYTES} bytes: check the path")
    lines = (line.partition(_COMMENT)[0].strip() for line in data.decode(errors="replace").splitlines())
    return frozenset(_fingerprint(path, number, line) for number, line in enumerate(lines, start=1) if line)


def _fingerprint(path: str, number: int, line: str) -> bytes:
    try:
        found = bytes.fromhex(line.rpartition("=")[2].replace(":", ""))
    except ValueError:
        found = b""
    if len(found) != _DIGEST_BYTES:
        raise ConfigError(
            f"tls_revoked: line {number} of {path} is no fingerprint: write what `openssl x509 -noout -fingerprint -sha256 -in FILE` prints"
        )
    return found


class CertificateValidity(NamedTuple):
    """Validity of a certificate, [begin, end]."""

    begin: datetime
    end: datetime


def validities(file: str) -> list[CertificateValidity]:
    """Return the validity of each certificate in the file, in order.

    Raises ConfigError: unreadable, damaged, or none.
    """
    try:
        data = Path(file).read_bytes()[:MAX_PEM_BYTES]
        found = [_validity(binascii.a2b_base64(body)) for body in _PEM.findall(data)]
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{file} has a damaged certificate: {error}") from None
    if not found:
        raise ConfigError(f"{file} has no certificate: it begins with no -----BEGIN CERTIFICATE-----")
    return found


class CertificateEnds:
    """Expiry of the first certificate of each file; changed files are read again. Not thread-safe."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """`files`: path by setting, "" if not set."""
        self._files = {setting: file for setting, file in files.items() if file}
        self._known: dict[str, tuple[object, float]] = {}
        """(signature of the file, Unix time of the expiry) by setting."""

    def left_s(self, now_s: float) -> dict[tuple[str, ...], float]:
        """Seconds until the end, by setting; negative for an expired one. A file that cannot be read is left out."""
        return {(setting,): end_s - now_s for setting, file in self._files.items() if (end_s := self._end_s(setting, file)) is not None}

    def _end_s(self, setting: str, file: str) -> float | None:
        now, known = signature(file), self._known.get(setting)
        if known is not None and known[0] == now:
            return known[1]
        try:
            end_s = min(one.end for one in validities(file)).timestamp()
        except ConfigError:
            return None
        self._known[setting] = now, end_s
        return end_s


def _validity(der: bytes) -> CertificateValidity:
    """Raises ValueError, IndexError."""
    [(_tag, certificate)] = _parts(der)
    _tag, to_be_signed = next(_parts(certificate))
    fields = [(tag, content) for tag, content in _parts(to_be_signed) if tag != _VERSION]
    # Serial number, signature algorithm, issuer, validity, ...
    if [tag for tag, _ in fields[:4]] != [_INTEGER, _SEQUENCE, _SEQUENCE, _SEQUENCE]:
        raise ValueError("not a certificate of RFC 5280")
    begin, end = (_time(tag, content) for tag, content in _parts(fields[3][1]))
    return CertificateValidity(begin, end)


def _parts(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each element of a DER sequence. Raises ValueError: truncated."""
    at = 0
    while at < len(data):
        tag, size, at = data[at], data[at + 1], at + 2
        if size >= 0x80:
            width = size & 0x7F
            size, at = int.from_bytes(data[at : at + width], "big"), at + width
        if at + size > len(data):
            raise ValueError("cut off")
        yield tag, data[at : at + size]
        at += size


def _time(tag: int, content: bytes) -> datetime:
    """Parse a DER time; two-digit years are 1950 to 2049. Raises ValueError."""
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("no time where its validity should be")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
