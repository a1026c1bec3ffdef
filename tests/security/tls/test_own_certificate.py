"""Promises of own_certificate.py."""

from dataclasses import replace

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.config import ServerTlsSettings
from kvstore.security.tls.own_certificate import OwnRole
from kvstore.security.tls.subjects import MASTER, NODE, CertificateSubject
from tests.security.tls.certified import HOSTS, certificates, past, shared, swap


def refused(settings: ServerTlsSettings) -> str:
    with pytest.raises(ConfigError) as caught:
        Certificates.of(settings)
    return str(caught.value)


def test_a_program_knows_what_its_certificate_is_for() -> None:
    both = shared().server(CertificateSubject(MASTER), CertificateSubject(NODE, "one"), hosts=HOSTS)
    assert certificates(both).subjects == (CertificateSubject(MASTER), CertificateSubject(NODE, "one"))
    assert certificates(replace(both, tls_require_client_cert=False)).subjects == (
        CertificateSubject(MASTER),
        CertificateSubject(NODE, "one"),
    )


def test_one_that_others_would_refuse_is_refused_at_the_start() -> None:
    assert refused(shared().server(CertificateSubject(NODE, "one"), hosts=HOSTS, valid=past())).startswith(
        "tls_cert: the certificate of this program has expired"
    )
    assert "is not meant for this end of a connection" in refused(shared().server(CertificateSubject(NODE, "one")))
    assert refused(shared().server(hosts=HOSTS)).startswith("tls_cert has no kvstore subject")


def role_refused(settings: ServerTlsSettings, role: OwnRole) -> str:
    with pytest.raises(ConfigError) as caught:
        certificates(settings).require_role(role)
    return str(caught.value)


def test_a_certificate_of_another_program_is_refused() -> None:
    text = role_refused(shared().node("one"), OwnRole(CertificateSubject(MASTER), ("127.0.0.1",)))
    assert text.startswith("tls_cert is for kvstore://node/one, and kvstore://master is required")
    assert "kvstore://node/two is required" in role_refused(shared().node("one"), OwnRole(CertificateSubject(NODE, "two")))


@pytest.mark.parametrize("host", ["master-2", "10.0.0.2", "::2"])
def test_a_certificate_of_another_host_is_refused(host: str) -> None:
    text = role_refused(shared().master(), OwnRole(CertificateSubject(MASTER), ("127.0.0.1", host)))
    assert text.startswith(f"tls_cert does not have {host}, by which peers reach this master")


def test_a_new_file_that_others_would_refuse_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    settings = shared().server(CertificateSubject(MASTER), hosts=HOSTS)
    own = certificates(settings)
    own.require_role(OwnRole(CertificateSubject(MASTER), ("127.0.0.1",)))
    before = own.pems()
    swap(settings, shared().node("one"))
    assert own.pems() == before
    assert "the changed certificates cannot be used, the former stay in use: tls_cert is for kvstore://node/one" in caplog.text
    swap(settings, shared().master())
    assert own.pems() != before
