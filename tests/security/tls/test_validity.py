"""Promises of validity.py; the package cryptography is the oracle."""

import base64
import datetime
from pathlib import Path

import pytest
from cryptography import x509

from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.authority import Validity as Wanted
from kvstore.security.tls.authority import issue, make_authority
from kvstore.security.tls.subjects import Subject
from kvstore.security.tls.validity import CertificateEnds, validities

BEGIN = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def made(folder: Path, end: datetime.datetime) -> Path:
    if not (folder / "ca.pem").exists():
        make_authority(folder)
    for old in folder.glob("n1.*"):
        old.unlink()
    return issue(folder, "n1", [Subject("node", "n1")], ["localhost"], valid=Wanted(BEGIN, end))[0]


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


def test_names_of_the_nineties_are_of_that_century(tmp_path: Path) -> None:
    old = b"\x17\x0d990102030405Z"
    file = tmp_path / "old.pem"
    file.write_bytes(pem(sequence(sequence(b"\xa0\x03\x02\x01\x02", NUMBER, EMPTY, EMPTY, sequence(old, old)))))
    assert validities(str(file))[0].end.year == 1999


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
