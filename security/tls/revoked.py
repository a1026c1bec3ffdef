"""Certificates that are good no more before their date is over: the file that the setting `tls_revoked` names.

    # engine 7 lost its key on the 3rd
    sha256 Fingerprint=9F:0A:...:44
    6a2d2c8e...30517

A line a certificate: the SHA-256 of its DER form, as `openssl x509 -noout -fingerprint -sha256 -in FILE` prints it, or its digits alone. No
CRL: a list that has to be issued anew every few days stops a whole cluster once it is not, and gRPC's Python library takes none. By its
fingerprint a certificate is known wherever it is shown, by gRPC too, and in connections that are open.
"""

import hashlib
from pathlib import Path
from typing import Final

from kvstore.protocol.errors import ConfigError

MAX_FILE_BYTES: Final = 4 << 20
"""Some 40,000 certificates: a file beyond that is another file."""
_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_COMMENT: Final = "#"


def fingerprint_of(der: bytes) -> bytes:
    """By which a certificate is named: SHA-256 of its DER form."""
    return hashlib.sha256(der).digest()


def read_revoked(path: str) -> frozenset[bytes]:
    """The fingerprints that the file names; none of no file (""). Raises ConfigError, which names the line that is none."""
    if not path:
        return frozenset()
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"tls_revoked: cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"tls_revoked: {path} has more than {MAX_FILE_BYTES} bytes: it is another file")
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
