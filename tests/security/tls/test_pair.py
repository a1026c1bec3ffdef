"""Promises of pair.py that certificates.py and https.py do not show: files that are exchanged while they are read are read again."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from kvstore.protocol.errors import ConfigError
from kvstore.security.tls import pair
from kvstore.security.tls.pair import load_pair
from kvstore.security.tls.subjects import MASTER, Subject
from tests.security.tls.certified import HOSTS, Cluster


def write(file: Path, text: str) -> None:
    file.write_text(text)


class Exchanged(ssl.SSLContext):
    """Somebody exchanges the files in the middle of each load."""

    exchange: Callable[[], None]
    loads = 0

    def load_cert_chain(self, certfile: Any, keyfile: Any = None, password: Any = None) -> None:
        self.loads += 1
        self.exchange()
        super().load_cert_chain(certfile, keyfile, password)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Cluster, Path, Path]:
    authority = Cluster(tmp_path / "authority")
    cert, key = authority.file(Subject(MASTER), hosts=HOSTS)
    return authority, cert, key


def test_a_pair_of_which_one_was_exchanged_meanwhile_is_read_again(files: tuple[Cluster, Path, Path]) -> None:
    authority, cert, key = files
    other_cert, other_key = authority.file(Subject(MASTER), hosts=HOSTS)
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
    assert context.loads == pair.ATTEMPTS


def test_files_that_do_not_change_are_read_once(files: tuple[Cluster, Path, Path]) -> None:
    _authority, cert, key = files
    context = Exchanged(ssl.PROTOCOL_TLS_SERVER)
    context.exchange = lambda: None
    with pytest.raises(ConfigError):
        load_pair(context, str(key), str(cert), settings="these")
    assert context.loads == 1


def test_an_encrypted_key_is_refused(files: tuple[Cluster, Path, Path]) -> None:
    _authority, cert, key = files
    made = serialization.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(
        made.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(ConfigError, match="the key is encrypted"):
        load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), str(cert), str(key), settings="these")
