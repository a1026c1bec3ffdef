"""Promises of https.py and of load_pair, with real files and handshakes."""

import logging
import socket
import ssl
from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.https import HttpsCertificate
from kvstore.security.tls.subjects import MASTER, CertificateSubject
from kvstore.testing.transfer.awaited import PATIENCE_S, in_background
from tests.security.tls.certified import HOSTS, Cluster


@pytest.fixture
def authority(tmp_path: Path) -> Cluster:
    folder = tmp_path / "authority"
    folder.mkdir()
    return Cluster(folder)


def issued(authority: Cluster) -> tuple[str, str]:
    cert, key = authority.file(CertificateSubject(MASTER), hosts=HOSTS)
    return str(cert), str(key)


def shown(certificate: HttpsCertificate, authority: Cluster) -> int:
    """The serial number of what a browser that trusts the authority is shown."""
    trusting = ssl.create_default_context(cafile=str(authority.folder / "ca.pem"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            accepted = listener.accept()[0]
            accepted.settimeout(PATIENCE_S)
            with certificate.context.wrap_socket(accepted, server_side=True) as served:
                served.recv(1)

        serving = in_background(accept)
        with socket.create_connection(listener.getsockname(), PATIENCE_S) as near:
            with trusting.wrap_socket(near, server_hostname="localhost") as made:
                told = made.getpeercert()
        serving.result(PATIENCE_S)
    assert told is not None
    return int(str(told["serialNumber"]), 16)


def test_without_files_there_is_none_and_one_alone_is_refused() -> None:
    assert HttpsCertificate.of("", "") is None
    for pair in (("cert.pem", ""), ("", "key.pem")):
        with pytest.raises(ConfigError, match="http_tls_cert and http_tls_key go together"):
            HttpsCertificate.of(*pair)


@pytest.mark.promise("tls-everywhere")
def test_files_that_cannot_be_used_are_refused(authority: Cluster, tmp_path: Path) -> None:
    cert, key = issued(authority)
    other = issued(authority)
    for pair in ((str(tmp_path / "none"), key), (key, cert), (cert, other[1])):
        with pytest.raises(ConfigError, match="are no certificate and its key in PEM"):
            HttpsCertificate(*pair)


def test_new_connections_use_the_reloaded_certificate(authority: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cert, key = issued(authority)
    certificate = HttpsCertificate.of(cert, key)
    assert certificate is not None
    former = shown(certificate, authority)
    certificate.look()
    for file, other in zip((cert, key), issued(authority), strict=True):
        Path(other).replace(file)
    assert shown(certificate, authority) == former
    with caplog.at_level(logging.INFO):
        certificate.look()
    assert "has changed and is in use" in caplog.text
    assert shown(certificate, authority) != former


@pytest.mark.promise("tls-everywhere")
def test_what_cannot_be_used_is_told_once_and_the_former_goes_on(authority: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cert, key = issued(authority)
    certificate = HttpsCertificate(cert, key)
    former = shown(certificate, authority)
    Path(issued(authority)[1]).replace(key)
    for _ in range(2):
        certificate.look()
    assert len([record for record in caplog.records if "cannot be used" in record.getMessage()]) == 1
    assert shown(certificate, authority) == former
