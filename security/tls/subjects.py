"""Subjects of certificates: URIs among the alternative names, which give a peer's role and name.

    kvstore://master            a master
    kvstore://node/NAME         the storage node NAME; node/* any
    kvstore://client/TENANT     a client of TENANT; client/* of any

NAME and TENANT are percent-encoded. Host names in a certificate are addresses, not roles: a client on a master's host
is not a master.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from kvstore.protocol.errors import Denied, Unauthorized, Untrusted
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, SERVER_MASTER, SERVER_NODE, Hello, Welcome
from kvstore.security.identity import UNAUTHENTICATED, Identity, IdentityKind, Role

SCHEME: Final = "kvstore://"
MASTER: Final = "master"
NODE: Final = "node"
CLIENT: Final = "client"
ANY: Final = "*"


class CertificateSubject(NamedTuple):
    """Subject of a certificate. `kind`: MASTER, NODE or CLIENT; `name`: of the node or tenant, ANY for all."""

    kind: str
    name: str = ""

    def uri(self) -> str:
        if self.kind == MASTER:
            return SCHEME + MASTER
        return f"{SCHEME}{self.kind}/{self.name if self.name == ANY else quote(self.name, safe='')}"


@dataclass(frozen=True, slots=True)
class CertifiedPeer:
    """Identity of a TLS peer, by its certificate."""

    subjects: tuple[CertificateSubject, ...]
    fingerprint: bytes = field(default=b"", compare=False, repr=False)
    """Fingerprint of the certificate (pem_files.py); b"" if unknown."""

    def is_a(self, kind: str, name: str = "") -> bool:
        return any(subject.kind == kind and subject.name in (name, ANY) for subject in self.subjects)

    def has(self, kind: str) -> bool:
        """Return True if the certificate has a subject of this kind, of any name."""
        return any(subject.kind == kind for subject in self.subjects)

    def __str__(self) -> str:
        return " and ".join(subject.uri() for subject in self.subjects) or "nothing of kvstore's"


def names_of(certificate: Mapping[str, Any]) -> list[str]:
    """Return all alternative names of a certificate in the form of `ssl.SSLSocket.getpeercert`."""
    return [name for _, name in certificate.get("subjectAltName", ())]


def peer_of(names: Iterable[str], fingerprint: bytes = b"") -> CertifiedPeer:
    """Return the identity for a certificate's alternative names; those of another form are ignored."""
    return CertifiedPeer(tuple(subject for name in names if (subject := _subject(name)) is not None), fingerprint)


def _subject(uri: str) -> CertificateSubject | None:
    kind, slash, name = uri.removeprefix(SCHEME).partition("/")
    if not uri.startswith(SCHEME) or (kind == MASTER) == bool(slash) or kind not in (MASTER, NODE, CLIENT):
        return None
    meant = unquote(name)
    return CertificateSubject(kind, meant) if meant != ANY or name == ANY else None  # an encoded * is no wildcard


def check_has(peer: CertifiedPeer, kinds: Iterable[str], who: str) -> None:
    """Raises Untrusted unless the certificate has a subject of one of these kinds. `who`: its bearer, for the error."""
    if not any(peer.has(kind) for kind in kinds):
        expected = " or ".join(CertificateSubject(kind, "NAME").uri() for kind in kinds)
        raise Untrusted(f"the certificate of {who} is for {peer}, and {expected} is required: create one with `kvstore certs`")


def check_hello(peer: CertifiedPeer | None, hello: Hello) -> None:
    """Raises Unauthorized if a Hello's role and name do not match the certificate; without a certificate it never does."""
    if peer is None:
        return
    if hello.role == ROLE_NODE and not peer.is_a(NODE, hello.name):
        raise Unauthorized(f"the certificate is for {peer}, and node {hello.name!r} introduces itself: make it one (kvstore certs node)")
    if hello.role == ROLE_CLIENT and not peer.is_a(CLIENT, hello.tenant):
        raise Unauthorized(
            f"the certificate is for {peer}, and a client of tenant {hello.tenant!r} introduces itself: make it one (kvstore certs client)"
        )


def check_welcome(peer: CertifiedPeer | None, welcome: Welcome) -> None:
    """Raises Untrusted if a Welcome's server and name do not match the certificate; without a certificate it never
    does.
    """
    if peer is None:
        return
    if welcome.server == SERVER_MASTER and not peer.is_a(MASTER):
        raise Untrusted(f"the certificate is for {peer}, and a master introduces itself: make it one (kvstore certs master)")
    if welcome.server == SERVER_NODE and not peer.is_a(NODE, welcome.name):
        raise Untrusted(f"the certificate is for {peer}, and node {welcome.name!r} introduces itself: make it one (kvstore certs node)")


def client_identity(peer: CertifiedPeer | None, tenant: str, token: str) -> Identity | None:
    """Return the identity of a client of this tenant; None: the certificate does not cover it, or it sends an
    operator's token.
    """
    if peer is None or not peer.is_a(CLIENT, tenant) or (token and not tenant):
        return None
    return Identity(IdentityKind.TENANT, _role(peer), tenant, certificate=peer.fingerprint)


def node_identity(peer: CertifiedPeer | None, name: str) -> Identity | None:
    """Return the identity of a node of this name; None: the certificate does not cover it."""
    return Identity(IdentityKind.NODE, name=name, certificate=peer.fingerprint) if peer is not None and peer.is_a(NODE, name) else None


def caller_identity(peer: CertifiedPeer | None, tenant: str) -> Identity | None:
    """Return the identity of a caller of the control plane; `tenant` is "" for nodes and operators.

    None: no certificate.

    Raises Unauthorized: the certificate is for another tenant.
    """
    if peer is None:
        return None
    if tenant:
        if not peer.is_a(CLIENT, tenant):
            raise Unauthorized(
                f"the certificate is for {peer}, and a client of tenant {tenant!r} calls: make it one (kvstore certs client)"
            )
        return client_identity(peer, tenant, "")
    for kind in (NODE, CLIENT):
        names = [subject.name for subject in peer.subjects if subject.kind == kind]
        if names:
            name = "" if ANY in names else names[0]
            role = Role.NONE if kind == NODE else _role(peer)
            return Identity(IdentityKind.NODE if kind == NODE else IdentityKind.TENANT, role, name, certificate=peer.fingerprint)
    return UNAUTHENTICATED


def _role(peer: CertifiedPeer) -> Role:
    return Role.ADMIN if CertificateSubject(CLIENT, ANY) in peer.subjects else Role.WRITE


def combine_identities(shown: Identity, certificate: Identity | None) -> Identity:
    """Merge the identities of a peer's token and certificate. Raises Denied: they are of different nodes."""
    if certificate is None:
        return shown
    if shown.kind is IdentityKind.ANONYMOUS:
        return certificate
    if shown.kind is IdentityKind.NODE and certificate.kind is IdentityKind.NODE and certificate.name:
        if not shown.may_use_name(certificate.name):
            raise Denied(f"the certificate is of {certificate}, the token of {shown}")
        return replace(shown, name=certificate.name)
    return shown
