"""An authority and certificates of a test's own: those of a cluster, and those that are to be refused."""

import atexit
import datetime
import functools
import hashlib
import os
import shutil
import ssl
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvstore.security.tls.authority import ValidityPeriod, issue, make_authority
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.config import ServerTlsSettings, TlsSettings
from kvstore.security.tls.subjects import ANY, CLIENT, MASTER, NODE, CertificateSubject

S = TypeVar("S", bound=TlsSettings)
HOSTS = ("127.0.0.1", "::1", "localhost")
_DAY = datetime.timedelta(days=1)


class Cluster:
    """One authority, and settings for who has a certificate of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_authority(folder)
        self._made = 0

    def file(self, *subjects: CertificateSubject, hosts: tuple[str, ...] = (), valid: ValidityPeriod | None = None) -> tuple[Path, Path]:
        """A new certificate and its key."""
        self._made += 1
        return issue(self.folder, f"cert-{self._made}", subjects, hosts, valid=valid)

    def server(self, *subjects: CertificateSubject, hosts: tuple[str, ...] = (), valid: ValidityPeriod | None = None) -> ServerTlsSettings:
        cert, key = self.file(*subjects, hosts=hosts, valid=valid)
        return ServerTlsSettings(tls_ca=str(self.folder / "ca.pem"), tls_cert=str(cert), tls_key=str(key))

    def expired(self, *subjects: CertificateSubject, valid: ValidityPeriod) -> ServerTlsSettings:
        """Of a server that does not look at its own certificate: one that does would not start with it."""
        return replace(self.server(*subjects, hosts=HOSTS, valid=valid), tls_ca="", tls_require_client_cert=False)

    def master(self) -> ServerTlsSettings:
        return self.server(CertificateSubject(MASTER), hosts=HOSTS)

    def node(self, name: str = ANY) -> ServerTlsSettings:
        return self.server(CertificateSubject(NODE, name), hosts=HOSTS)

    def client(self, tenant: str = ANY, valid: ValidityPeriod | None = None) -> TlsSettings:
        cert, key = self.file(CertificateSubject(CLIENT, tenant), valid=valid)
        return TlsSettings(tls_ca=str(self.folder / "ca.pem"), tls_cert=str(cert), tls_key=str(key))


def given_to(settings: S, tls: TlsSettings) -> S:
    """Other settings with these of TLS."""
    names = ("tls_ca", "tls_cert", "tls_key", "tls_revoked")
    return replace(settings, **{name: getattr(tls, name) for name in names})


def flags(tls: TlsSettings) -> list[str]:
    """For a program's command line."""
    return ["--tls-ca", tls.tls_ca, "--tls-cert", tls.tls_cert, "--tls-key", tls.tls_key]


def certificates(settings: TlsSettings) -> Certificates:
    found = Certificates.of(settings)
    assert found is not None
    return found


def past() -> ValidityPeriod:
    """Over since yesterday."""
    now = datetime.datetime.now(datetime.UTC)
    return ValidityPeriod(now - 2 * _DAY, now - _DAY)


def to_come() -> ValidityPeriod:
    now = datetime.datetime.now(datetime.UTC)
    return ValidityPeriod(now + _DAY, now + 2 * _DAY)


def shared() -> Cluster:
    """One for all tests of a process that only use it: its folder is removed with it."""
    return _shared_by(os.getpid())


@functools.cache
def _shared_by(pid: int) -> Cluster:
    """A fork has one of its own: it would give the same names to other certificates, and remove what its parent goes on
    with.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvstore-certs-"))

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(folder)

    atexit.register(remove)
    return Cluster(folder)


def revoke(path: Path, *settings: TlsSettings) -> None:
    """The file says from now on that these certificates are revoked, as openssl prints their fingerprints."""
    ders = [ssl.PEM_cert_to_DER_cert(Path(one.tls_cert).read_text()) for one in settings]
    lines = [f"sha256 Fingerprint={hashlib.sha256(der).digest().hex(':').upper()}\n" for der in ders]
    fresh = path.with_suffix(".fresh")
    fresh.write_text("".join(lines))
    fresh.replace(path)


def swap(settings: TlsSettings, other: TlsSettings) -> None:
    """The files of `settings` hold from now on what those of `other` do, replaced as operators do it: the key first,
    each at once.
    """
    for name in ("tls_key", "tls_cert", "tls_ca"):
        place = Path(getattr(settings, name))
        fresh = place.with_suffix(".fresh")
        shutil.copy(getattr(other, name), fresh)
        fresh.replace(place)
