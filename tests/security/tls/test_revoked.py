"""Promises of revoked.py; what becomes of connections: test_certificates.py."""

import hashlib
import ssl
import subprocess
from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.revoked import MAX_FILE_BYTES, fingerprint_of, read_revoked
from tests.security.tls.certified import shared

ONE, OTHER = hashlib.sha256(b"one"), hashlib.sha256(b"other")


def test_a_fingerprint_is_the_one_that_openssl_prints(tmp_path: Path) -> None:
    cert, path = shared().client().tls_cert, tmp_path / "revoked"
    told = subprocess.run(["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", cert], check=True, capture_output=True, text=True)
    path.write_text(told.stdout)
    assert read_revoked(str(path)) == {fingerprint_of(ssl.PEM_cert_to_DER_cert(Path(cert).read_text()))}


def test_a_line_names_a_certificate_with_or_without_what_openssl_says_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "revoked"
    path.write_text(f"# both\n\n{ONE.hexdigest().upper()}  # the first\nsha256 Fingerprint={OTHER.digest().hex(':')}\r\n")
    assert read_revoked(str(path)) == {ONE.digest(), OTHER.digest()}
    path.write_text("")
    assert read_revoked(str(path)) == read_revoked("") == frozenset()


@pytest.mark.parametrize("line", [b"red", b"AB:CD", ONE.hexdigest().encode() + b"00", b"\xff\xfe", b"sha1 Fingerprint=" + b"00" * 20])
def test_a_line_that_is_no_fingerprint_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "revoked"
    path.write_bytes(ONE.hexdigest().encode() + b"\n" + line)
    with pytest.raises(ConfigError, match=f"tls_revoked: line 2 of {path} is no fingerprint"):
        read_revoked(str(path))


def test_a_file_that_cannot_be_read_or_is_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"tls_revoked: cannot read {tmp_path}: Is a directory"):
        read_revoked(str(tmp_path))
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ConfigError, match="it is another file"):
        read_revoked(str(path))
