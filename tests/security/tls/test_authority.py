"""Promises of authority.py; that what it makes is accepted by TLS the other tests of this folder show."""

import resource
from pathlib import Path
from stat import S_IMODE

import pytest
from cryptography import x509

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.security.tls.authority import CA_CERT, CA_KEY, issue, make_authority
from kvstore.security.tls.subjects import CLIENT, NODE, CertificateSubject


def names(cert: Path) -> list[str]:
    found = x509.load_pem_x509_certificate(cert.read_bytes()).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def test_certificate_has_subjects_and_hosts_key_is_private(tmp_path: Path) -> None:
    make_authority(tmp_path / "certs")
    cert, key = issue(tmp_path / "certs", "one", [CertificateSubject(NODE, "one")], ["node-1.example", "10.0.0.1", "[::1]"])
    assert names(cert) == ["kvstore://node/one", "node-1.example", "10.0.0.1", "::1"]
    assert [S_IMODE(path.stat().st_mode) for path in (key, tmp_path / "certs" / CA_KEY)] == [0o600, 0o600]
    assert S_IMODE((tmp_path / "certs").stat().st_mode) == 0o700


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    make_authority(tmp_path)
    before = (tmp_path / CA_KEY).read_bytes()
    with pytest.raises(ConfigError, match=r"ca.pem exists: remove it first"):
        make_authority(tmp_path)
    (tmp_path / CA_CERT).rename(tmp_path / "moved.pem")
    with pytest.raises(ConfigError, match=r"ca.key exists"):
        make_authority(tmp_path)
    (tmp_path / "moved.pem").rename(tmp_path / CA_CERT)
    issue(tmp_path, "one", [CertificateSubject(NODE, "one")])
    with pytest.raises(ConfigError, match=r"one.pem exists"):
        issue(tmp_path, "one", [CertificateSubject(NODE, "one")])
    assert (tmp_path / CA_KEY).read_bytes() == before


@pytest.mark.parametrize(("room_bytes", "unwritten"), [(0, CA_KEY), (300, CA_CERT)])
def test_pair_that_cannot_be_written_is_refused_without_trace(tmp_path: Path, room_bytes: int, unwritten: str) -> None:
    """RLIMIT_FSIZE stands for a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        with pytest.raises(ConfigError, match=f"^cannot write {tmp_path / unwritten}: File too large$"):
            make_authority(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    make_authority(tmp_path)


def test_names_that_no_certificate_can_have_are_refused(tmp_path: Path) -> None:
    make_authority(tmp_path)
    with pytest.raises(InvalidArgument, match="a name of 2000 characters is too long"):
        issue(tmp_path, "one", [CertificateSubject(CLIENT, "x" * 2000)])
    with pytest.raises(InvalidArgument, match="'größe' is neither a host name in ASCII nor an address"):
        issue(tmp_path, "one", [CertificateSubject(NODE, "one")], ["größe"])
