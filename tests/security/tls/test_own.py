"""Promises of own.py."""

from dataclasses import replace

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.config import ServerTlsSettings
from kvstore.security.tls.subjects import MASTER, NODE, Subject
from tests.security.tls.certified import HOSTS, certificates, past, shared


def refused(settings: ServerTlsSettings) -> str:
    with pytest.raises(ConfigError) as caught:
        Certificates.of(settings)
    return str(caught.value)


def test_a_program_knows_what_its_certificate_is_for() -> None:
    both = shared().server(Subject(MASTER), Subject(NODE, "one"), hosts=HOSTS)
    assert certificates(both).subjects == (Subject(MASTER), Subject(NODE, "one"))
    assert certificates(replace(both, tls_require_client_cert=False)).subjects == (Subject(MASTER), Subject(NODE, "one"))


def test_one_that_others_would_refuse_is_refused_at_the_start() -> None:
    assert refused(shared().server(Subject(NODE, "one"), hosts=HOSTS, valid=past())).startswith(
        "tls_cert: the certificate of this program has expired"
    )
    assert "is not meant for this end of a connection" in refused(shared().server(Subject(NODE, "one")))
    assert refused(shared().server(hosts=HOSTS)).startswith("tls_cert: it is for nothing of kvstore's")
