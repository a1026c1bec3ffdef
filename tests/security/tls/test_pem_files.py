"""Promises of pem_files.py."""

import base64
import datetime
import hashlib
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from kvstore.protocol.errors import ConfigError
from kvstore.security.tls import pem_files
from kvstore.security.tls.authority import ValidityPeriod as Wanted
from kvstore.security.tls.authority import issue, make_authority
from kvstore.security.tls.pem_files import MAX_REVOKED_BYTES, CertificateEnds, fingerprint_of, load_pair, read_revoked, validities
from kvstore.security.tls.subjects import MASTER, CertificateSubject
from tests.security.tls.certified import HOSTS, Cluster, shared


def write(file: Path, text: str) -> None:
    file.write_text(text)


class Exchanged(ssl.SSLContext):
    """The files are replaced in the middle of each load."""

    exchange: Callable[[], None]
    loads = 0

    def load_cert_chain(self, certfile: Any, keyfile: Any = None, password: Any = None) -> None:
        self.loads += 1
        self.exchange()
        super().load_cert_chain(certfile, keyfile, password)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Cluster, Path, Path]:
    authority = Cluster(tmp_path / "authority")
    cert, key = authority.file(CertificateSubject(MASTER), hosts=HOSTS)
    return authority, cert, key


def test_pair_replaced_during_the_load_is_read_again(files: tuple[Cluster, Path, Path]) -> None:
    authority, cert, key = files
    other_cert, other_key = authority.file(CertificateSubject(MASTER), hosts=HOSTS)
    context = Exchanged(ssl.PROTOCOL_TLS_SERVER)
    context.exchange = lambda: write(*((cert, other_cert.read_text()) if context.loads == 1 else (key, other_key.read_text())))
    load_pair(context, str(cert), str(key), settings="these")
    assert context.loads == 2


def test_files_that_change_for_ever_are_given_up(files: tuple[Cluster, Path, Path]) -> None:
    _authority, cert, key = files
    context = Exchanged(ssl.PROTOCOL_TLS_SERVER)
    context.exchange = lambda: write(cert, "x" * context.loads)
    with pytest.raises(ConfigError, match=r"these: .* are no certificate and its key"):
        load_pair(context, str(cert), str(key), settings="these")
    assert context.loads == pem_files.ATTEMPTS


def test_an_encrypted_key_is_refused(files: tuple[Cluster, Path, Path]) -> None:
    _authority, cert, key = files
    made = serialization.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(
        made.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(ConfigError, match="the key is encrypted"):
        load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), str(cert), str(key), settings="these")


ONE, OTHER = hashlib.sha256(b"one"), hashlib.sha256(b"other")


def test_a_fingerprint_is_the_one_that_openssl_prints(tmp_path: Path) -> None:
    cert, path = shared().client().tls_cert, tmp_path / "revoked"
    told = subprocess.run(["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", cert], check=True, capture_output=True, text=True)
    path.write_text(told.stdout)
    assert read_revoked(str(path)) == {fingerprint_of(ssl.PEM_cert_to_DER_cert(Path(cert).read_text()))}


def test_revoked_line_is_parsed_with_and_without_prefix(tmp_path: Path) -> None:
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
        file.truncate(MAX_REVOKED_BYTES + 1)
    with pytest.raises(ConfigError, match="check the path"):
        read_revoked(str(path))


BEGIN = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def made(folder: Path, end: datetime.datetime) -> Path:
    if not (folder / "ca.pem").exists():
        make_authority(folder)
    for old in folder.glob("n1.*"):
        old.unlink()
    return issue(folder, "n1", [CertificateSubject("node", "n1")], ["localhost"], valid=Wanted(BEGIN, end))[0]


@pytest.mark.parametrize("year", [2027, 2049, 2050, 2099])
def test_times_are_those_of_the_certificate(tmp_path: Path, year: int) -> None:
    """From 2050 on they are of another form."""
    file = made(tmp_path, BEGIN.replace(year=year))
    found = x509.load_pem_x509_certificates(file.read_bytes())
    assert validities(str(file)) == [(one.not_valid_before_utc, one.not_valid_after_utc) for one in found]
    assert validities(str(file))[0] == (BEGIN, BEGIN.replace(year=year))


def pem(der: bytes) -> bytes:
    return b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(der) + b"-----END CERTIFICATE-----\n"


def sequence(*parts: bytes) -> bytes:
    content = b"".join(parts)
    return bytes((0x30, len(content))) + content


NUMBER, EMPTY = b"\x02\x01\x05", sequence()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nothing",
        pem(b""),
        pem(b"\x30"),
        pem(b"\x30\x05\x30"),
        pem(sequence(sequence(NUMBER, NUMBER))),
        pem(sequence(sequence(NUMBER, EMPTY, EMPTY, sequence(NUMBER, NUMBER)))),
        pem(sequence(sequence(NUMBER, EMPTY, EMPTY, sequence(b"\x17\x01x", b"\x17\x01x")))),
        pem(sequence(sequence(NUMBER, EMPTY, EMPTY, EMPTY))),
        b"-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n",
    ],
)
def test_what_is_no_certificate_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.pem"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="certificate"):
        validities(str(file))
    with pytest.raises(ConfigError, match="cannot read"):
        validities(str(tmp_path / "none.pem"))


def test_ends_are_those_of_the_files_now(tmp_path: Path) -> None:
    end = BEGIN + datetime.timedelta(days=90)
    file = made(tmp_path, end)
    ends = CertificateEnds({"tls_cert": str(file), "http_tls_cert": "", "tls_ca": str(tmp_path / "none.pem")})
    now_s = end.timestamp() - 100
    assert ends.left_s(now_s) == {("tls_cert",): 100.0}
    assert ends.left_s(now_s + 200) == {("tls_cert",): -100.0}
    later = made(tmp_path, end + datetime.timedelta(days=1))
    assert later == file
    assert ends.left_s(now_s) == {("tls_cert",): 86_500.0}
