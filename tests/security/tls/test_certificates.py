"""Promises of certificates.py, with real files; its clock is the test's."""

import logging
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvstore.protocol.errors import ConfigError, Untrusted
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.config import ServerTlsSettings, TlsSettings
from kvstore.security.tls.own_certificate import OwnRole
from kvstore.security.tls.subjects import MASTER, CertificateSubject, CertifiedPeer, check_has
from kvstore.security.tls.tls_socket import TlsSocket
from kvstore.testing.transfer.awaited import PATIENCE_S, in_background
from tests.security.tls.certified import Cluster, certificates, revoke, shared, swap


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def met(client: Certificates, server: Certificates) -> tuple[CertifiedPeer | None, CertifiedPeer | None]:
    """Connect both ends and return the certified peer that each of them finds."""
    near, far = pair()
    serving = in_background(lambda: shaken(server.begin_from(far)))
    made = client.connect(near, "127.0.0.1", PATIENCE_S)
    found = made.certified, serving.result(PATIENCE_S)
    made.close()
    return found


def shaken(end: TlsSocket) -> CertifiedPeer | None:
    with end:
        end.shake_hands(PATIENCE_S)
        return end.certified


def test_peer_known_by_subject_needs_no_host_name() -> None:
    server = certificates(shared().server(CertificateSubject(MASTER), hosts=("elsewhere",)))
    near, far = pair()
    serving = in_background(lambda: shaken(server.begin_from(far)))

    def check(peer: CertifiedPeer | None) -> None:
        assert peer is not None
        check_has(peer, (MASTER,), "it")

    client = certificates(shared().client()).begin_to_subject(near, "it", check)
    client.shake_hands(PATIENCE_S)
    assert serving.result(PATIENCE_S) is not None
    client.close()


def test_a_server_that_is_not_meant_ends_the_connection() -> None:
    near, far = pair()
    server = certificates(shared().server(CertificateSubject(MASTER), hosts=("10.0.0.9",))).begin_from(far)
    serving = in_background(lambda: server.shake_hands(PATIENCE_S))
    with pytest.raises(Untrusted):
        certificates(shared().client()).connect(near, "127.0.0.1", PATIENCE_S)
    assert near.fileno() == -1
    serving.exception(PATIENCE_S)
    server.close()


def test_files_that_change_are_used_by_the_next_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(tmp_path)
    settings = cluster.client("red")
    client, server = certificates(settings), certificates(cluster.master())

    def name() -> str:
        found = met(client, server)[1]
        assert found is not None
        return found.subjects[0].name

    assert name() == "red"
    swap(settings, cluster.client("blue"))
    with caplog.at_level(logging.INFO, "kvstore.security"):
        assert name() == "blue"
    assert "the certificates have changed and are in use" in caplog.text


@pytest.mark.promise("tls-everywhere")
def test_unusable_files_are_logged_once_and_former_stay_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(tmp_path)
    settings = cluster.client("red")
    client, server = certificates(settings), certificates(shared().master())
    key = Path(settings.tls_key).read_bytes()
    before = client.pems()
    Path(settings.tls_key).write_bytes(b"nonsense")
    for _ in range(2):
        assert client.pems() == before
    assert caplog.text.count("cannot be used, the former stay in use: tls_cert and tls_key: ") == 1
    Path(settings.tls_key).unlink()
    assert client.pems() == before
    assert f"tls_key: cannot read {settings.tls_key}: No such file or directory" in caplog.text
    Path(settings.tls_key).write_bytes(key)
    assert client.pems() == before
    assert server.serves


def refused(settings: TlsSettings) -> str:
    with pytest.raises(ConfigError) as caught:
        Certificates.of(settings)
    return str(caught.value)


def test_what_cannot_be_used_is_refused_at_once_and_by_name(tmp_path: Path) -> None:
    good = shared().master()
    assert refused(replace(good, tls_key="")) == "tls_cert and tls_key go together: set both, or neither"
    assert refused(replace(good, tls_cert="", tls_ca="")) == "tls_cert and tls_key go together: set both, or neither"
    assert refused(replace(good, tls_ca="")).startswith("tls_require_client_cert requires tls_ca")
    assert refused(replace(good, tls_ca="/absent.pem")) == "tls_ca: cannot read /absent.pem: No such file or directory"
    assert refused(replace(good, tls_ca=good.tls_key)) == f"tls_ca: {good.tls_key} holds no certificate in PEM form"
    mismatch = refused(replace(good, tls_key=shared().client().tls_key))
    assert "are no certificate and its key in PEM (key_values_mismatch)" in mismatch
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
        )
    )
    assert "the key is encrypted, and a daemon cannot prompt" in refused(replace(good, tls_key=str(encrypted)))


@pytest.mark.promise("tls-everywhere")
def test_revoked_certificate_opens_nothing_and_ends_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.security.tls.certificates.LOOK_INTERVAL_NS", 0)
    cluster, revoked = Cluster(tmp_path / "certs"), tmp_path / "revoked"
    revoke(revoked)
    red, other, master = cluster.client("red"), cluster.client("red"), cluster.master()
    server = certificates(replace(master, tls_revoked=str(revoked)))

    def opened(client: Certificates) -> tuple[TlsSocket, TlsSocket]:
        near, far = pair()
        accepted = server.begin_from(far)
        serving = in_background(lambda: accepted.shake_hands(PATIENCE_S))
        made = client.connect(near, "127.0.0.1", PATIENCE_S)
        try:
            serving.result(PATIENCE_S)
        except Untrusted:
            made.close()
            accepted.close()
            raise
        accepted.settimeout(PATIENCE_S)
        return made, accepted

    theirs = opened(certificates(red))
    kept = opened(certificates(other))
    wary = opened(certificates(replace(other, tls_revoked=str(revoked))))
    for made, _ in (theirs, kept, wary):
        made.sendall(b"said")
    revoke(revoked, red)
    for use in (lambda: theirs[1].recv(4), lambda: theirs[1].send(b"told")):
        with pytest.raises(ConnectionAbortedError, match="has been revoked"):
            use()
    assert kept[1].recv(4) == wary[1].recv(4) == b"said"
    assert [server.is_revoked(accepted.certified) for _, accepted in (theirs, kept, wary)] == [True, False, False]
    assert not server.is_revoked(None)
    with pytest.raises(Untrusted, match=r"has been revoked \(tls_revoked\)"):
        opened(certificates(red))
    revoke(revoked, red, master)
    kept[0].sendall(b"more")
    with pytest.raises(ConnectionAbortedError, match="has been revoked"):
        wary[0].send(b"more")
    for both in (theirs, kept, wary):
        for end in both:
            end.close()


def test_peer_that_connects_and_serves_needs_all_tls_files() -> None:
    whole = shared().node()
    assert Certificates.of_peer(whole, "a node") is not None
    assert Certificates.of_peer(ServerTlsSettings(), "a node") is None
    without_ca = replace(whole, tls_ca="", tls_require_client_cert=False)
    for lacking in (without_ca, replace(whole, tls_cert="", tls_key="")):
        with pytest.raises(ConfigError, match="a node connects and serves: for TLS set tls_ca, tls_cert and tls_key"):
            Certificates.of_peer(lacking, "a node")


def test_a_program_holds_its_certificate_to_its_role() -> None:
    settings = shared().master()
    own = certificates(settings)
    own.require_role(OwnRole(CertificateSubject(MASTER), ("127.0.0.1",)))
    with pytest.raises(ConfigError, match="tls_cert does not have elsewhere"):
        own.require_role(OwnRole(CertificateSubject(MASTER), ("elsewhere",)))
    certificates(shared().client()).require_role(OwnRole(CertificateSubject(MASTER)))
    before = own.pems()
    swap(settings, shared().node("one"))
    assert own.pems() == before, "a file that others would refuse is not taken"
