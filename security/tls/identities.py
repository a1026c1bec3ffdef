"""Who a certificate makes of its owner, beside the token that he shows or in place of one.

A client's certificate stands for its tenant with role write, and one for every tenant (client/*) is an operator's: role admin. A node's
stands for that node. What both are shown for is allowed only as far as both go.
"""

from dataclasses import replace

from kvstore.protocol.errors import Denied, Unauthorized
from kvstore.security.identity import STRANGER, Identity, Kind, Role
from kvstore.security.tls.subjects import ANY, CLIENT, NODE, CertifiedPeer, Subject


def of_client(peer: CertifiedPeer | None, tenant: str, token: str) -> Identity | None:
    """For who says that he is of this tenant; None: the certificate says nothing of it, or he shows an operator's token, which belongs to
    no tenant."""
    if peer is None or not peer.is_a(CLIENT, tenant) or (token and not tenant):
        return None
    return Identity(Kind.TENANT, _role(peer), tenant, certificate=peer.fingerprint)


def of_node(peer: CertifiedPeer | None, name: str) -> Identity | None:
    """For a node that says that it is the one of this name."""
    return Identity(Kind.NODE, name=name, certificate=peer.fingerprint) if peer is not None and peer.is_a(NODE, name) else None


def of_caller(peer: CertifiedPeer | None, tenant: str) -> Identity | None:
    """For who calls the control plane, for a tenant or "" for none: a node says there only later which it is. None: no certificate. Raises
    Unauthorized for a tenant that is not the certificate's."""
    if peer is None:
        return None
    if tenant:
        if not peer.is_a(CLIENT, tenant):
            raise Unauthorized(
                f"the certificate is for {peer}, and a client of tenant {tenant!r} calls: make it one (kvstore certs client)"
            )
        return of_client(peer, tenant, "")
    for kind in (NODE, CLIENT):
        names = [subject.name for subject in peer.subjects if subject.kind == kind]
        if names:
            name = "" if ANY in names else names[0]
            role = Role.NONE if kind == NODE else _role(peer)
            return Identity(Kind.NODE if kind == NODE else Kind.TENANT, role, name, certificate=peer.fingerprint)
    return STRANGER


def _role(peer: CertifiedPeer) -> Role:
    return Role.ADMIN if Subject(CLIENT, ANY) in peer.subjects else Role.WRITE


def both(shown: Identity, certificate: Identity | None) -> Identity:
    """Who showed a token and a certificate, or what is in force in their place. Raises Denied: they are of different nodes."""
    if certificate is None:
        return shown
    if shown.kind is Kind.EVERYBODY:
        return certificate
    if shown.kind is Kind.NODE and certificate.kind is Kind.NODE and certificate.name:
        if not shown.goes_by(certificate.name):
            raise Denied(f"the certificate is of {certificate}, the token of {shown}")
        return replace(shown, name=certificate.name)
    return shown
