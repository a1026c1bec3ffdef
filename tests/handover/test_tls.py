"""Ranks with certificates hand over by TLS, and only to peers with a certificate for a rank."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvstore.handover.config import HandoverSettings
from kvstore.protocol.errors import ConfigError, KVStoreError
from kvstore.protocol.settings import Size
from kvstore.security.tls.config import TlsSettings
from kvstore.security.tls.subjects import CLIENT, CertificateSubject
from tests.handover.scene import Executor, layout_of
from tests.handover.test_transceiver import hand_over
from tests.security.tls.certified import HOSTS, given_to, shared


def executor(tls: TlsSettings | None) -> Executor:
    settings = HandoverSettings(deadline_s=20, direct_min_bytes=Size(1 << 30), staging_part_bytes=Size(4096))
    settings = given_to(settings, tls) if tls is not None else settings
    return Executor(layout_of(), settings)


def engine(tenant: str) -> TlsSettings:
    return shared().server(CertificateSubject(CLIENT, tenant), hosts=HOSTS)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_cache_is_handed_over_by_tls(opened: ExitStack) -> None:
    source, destination = opened.enter_context(executor(engine("red"))), opened.enter_context(executor(engine("red")))
    hand_over(source, destination)


@pytest.mark.parametrize("other", [None, "blue"])
def test_ranks_without_a_certificate_of_the_tenant_are_rejected(opened: ExitStack, other: str | None) -> None:
    source = opened.enter_context(executor(engine("red")))
    destination = opened.enter_context(executor(engine(other) if other is not None else None))
    sent = source.send(b"r", [0], 16)
    wanted = destination.receive(b"r", [1], 16, source)
    for sending in sent:
        sending.all_ready()
    with pytest.raises(KVStoreError, match=r"requires TLS|is for kvstore://client/red"):
        wanted[0].wait()
    sent[0].cancel()


def test_certificates_that_serve_only_one_end_are_refused() -> None:
    with pytest.raises(ConfigError, match="a rank of a hand-over connects and serves: for TLS set"):
        executor(TlsSettings(tls_ca=shared().client().tls_ca))
