"""Promises of refusals.py, with what OpenSSL says of real handshakes; a few of its errors are made, since no peer here
causes them.
"""

import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.protocol.errors import Untrusted
from kvstore.security.tls.certificates import SERVERS, Certificates
from kvstore.security.tls.config import ServerTlsSettings
from kvstore.security.tls.refusals import tls_error
from kvstore.security.tls.subjects import MASTER, CertificateSubject
from kvstore.testing.transfer.awaited import PATIENCE_S, in_background
from tests.security.tls.certified import Cluster, certificates, past, shared, to_come

PEER = "127.0.0.1"


def told(client: Certificates, server: Certificates, host: str = PEER) -> tuple[str, str]:
    """Errors of each side in a handshake, and in the first bytes after it."""
    with socket.create_server((PEER, 0)) as listener:
        near = client.begin_to(socket.create_connection(listener.getsockname()), host, SERVERS)
        far = server.begin_from(listener.accept()[0])

    def use(end: "ssl.SSLSocket", act: Callable[[], object]) -> str:
        try:
            end.setblocking(True)
            act()
        except Untrusted as error:
            return str(error)
        except OSError:
            return "gone"
        return ""

    serving = in_background(lambda: use(far, lambda: (far.recv(1), far.send(b"!"))))
    ours = use(near, lambda: (near.send(b"?"), near.recv(1)))
    near.close()
    theirs = serving.result(PATIENCE_S)
    far.close()
    return ours, theirs


def test_two_that_trust_one_another_are_told_nothing() -> None:
    assert told(certificates(shared().client()), certificates(shared().master())) == ("", "")


def of_a_client() -> ServerTlsSettings:
    """Settings of a server with a client's certificate."""
    own = shared().client("red")
    return ServerTlsSettings(tls_cert=own.tls_cert, tls_key=own.tls_key, tls_require_client_cert=False)


@pytest.mark.parametrize(
    ("server", "host", "text"),
    [
        (lambda: shared().expired(CertificateSubject(MASTER), valid=past()), PEER, "has expired: make a new one"),
        (lambda: shared().expired(CertificateSubject(MASTER), valid=to_come()), PEER, "is not valid yet: compare the clocks"),
        (lambda: shared().server(CertificateSubject(MASTER), hosts=("10.0.0.9",)), PEER, "is for other addresses: make one that names"),
        (lambda: shared().server(CertificateSubject(MASTER), hosts=("elsewhere",)), "localhost", "is for other hosts: make one that names"),
        (of_a_client, PEER, "is not meant for this end of a connection"),
    ],
)
def test_a_servers_certificate_that_is_wrong(server: Callable[[], ServerTlsSettings], host: str, text: str) -> None:
    ours, theirs = told(certificates(shared().client()), certificates(server()), host)
    assert ours.startswith(f"the certificate of {host} {text}")
    assert theirs


def test_authorities_that_do_not_know_one_another(tmp_path: Path) -> None:
    other = Cluster(tmp_path)
    ours, theirs = told(certificates(shared().client()), certificates(other.master()))
    assert ours == "the certificate of 127.0.0.1 is signed by an authority that is not in tls_ca"
    assert "does not know the authority of this side's certificate: both need one tls_ca" in theirs
    stranger = replace(other.client(), tls_ca=shared().client().tls_ca)
    ours, theirs = told(certificates(stranger), certificates(shared().master()))
    assert "is signed by an authority that is not in tls_ca" in theirs
    assert ours == "127.0.0.1 does not know the authority of this side's certificate: both need one tls_ca"


def test_a_client_without_a_certificate_or_with_one_that_is_over() -> None:
    bare = replace(shared().client(), tls_cert="", tls_key="")
    ours, theirs = told(certificates(bare), certificates(shared().master()))
    assert ours == "127.0.0.1 requires a certificate: set tls_cert and tls_key"
    assert "has no certificate, and tls_require_client_cert is set" in theirs
    assert told(certificates(bare), certificates(replace(shared().master(), tls_require_client_cert=False))) == ("", "")
    over = shared().client("red", valid=past())
    ours, theirs = told(certificates(over), certificates(shared().master()))
    assert ours == "127.0.0.1 reports that this side's certificate has expired: make a new one"
    assert "has expired: make a new one" in theirs


def test_a_server_that_does_not_speak_tls() -> None:
    with socket.create_server((PEER, 0)) as listener:
        near = certificates(shared().client()).begin_to(socket.create_connection(listener.getsockname()), PEER, SERVERS)
        far = listener.accept()[0]
        far.sendall(b"kV\4 and not TLS")
        with pytest.raises(Untrusted, match=r"^127.0.0.1 does not speak TLS: give it tls_cert and tls_key, or leave"):
            near.shake_hands(PATIENCE_S)
        near.close()
        far.close()


def test_a_client_that_does_not_speak_tls() -> None:
    with socket.create_server((PEER, 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far = certificates(shared().master()).begin_from(listener.accept()[0])
    near.sendall(b"kV\4 and not TLS")
    host, port = near.getsockname()
    with pytest.raises(Untrusted) as caught:
        far.shake_hands(PATIENCE_S)
    assert str(caught.value) == (
        f"this port requires TLS, and {host}:{port} does not use it: set its tls_ca to the authority of this port's certificate"
    )
    near.close()
    far.close()


def test_what_has_no_line_of_its_own_is_told_in_openssls_words() -> None:
    unknown = ssl.SSLError(1, "[SSL: BAD_ECPOINT] bad ecpoint (_ssl.c:1)")
    unknown.reason = "BAD_ECPOINT"
    assert str(tls_error(unknown, "h")) == "no TLS with h: bad ecpoint"
    unverified = ssl.SSLCertVerificationError(1, "no")
    unverified.verify_code, unverified.verify_message = 23, "certificate revoked"
    assert str(tls_error(unverified, "h")) == "the certificate of h is not accepted: certificate revoked"
