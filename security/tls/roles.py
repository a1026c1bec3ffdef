"""What a certificate says of its owner: its roles, as URIs among the certificate's alternative names.

    kvstore://master            a master
    kvstore://node/NAME         the storage node NAME; node/* any
    kvstore://client/TENANT     a client of TENANT; client/* of any

NAME and TENANT are percent-encoded. The names of hosts beside them say where it may be reached, not what it is: a client that runs on the
host of a master is no master.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from kvstore.protocol.errors import Unauthorized, Untrusted
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, SERVER_MASTER, SERVER_NODE, Hello, Welcome

SCHEME: Final = "kvstore://"
MASTER: Final = "master"
NODE: Final = "node"
CLIENT: Final = "client"
ANY: Final = "*"


class Role(NamedTuple):
    """One role: `kind` is MASTER, NODE or CLIENT, `name` a node's or a tenant's, ANY for all of them."""

    kind: str
    name: str = ""

    def uri(self) -> str:
        if self.kind == MASTER:
            return SCHEME + MASTER
        return f"{SCHEME}{self.kind}/{self.name if self.name == ANY else quote(self.name, safe='')}"


@dataclass(frozen=True, slots=True)
class CertifiedPeer:
    """The other end of a TLS connection, as its certificate has it."""

    roles: tuple[Role, ...]

    def is_a(self, kind: str, name: str = "") -> bool:
        return any(role.kind == kind and role.name in (name, ANY) for role in self.roles)

    def has(self, kind: str) -> bool:
        """Whether it has a role of that kind, of whatever name."""
        return any(role.kind == kind for role in self.roles)

    def __str__(self) -> str:
        return " and ".join(role.uri() for role in self.roles) or "no role of kvstore's"


def peer_of(names: Iterable[str]) -> CertifiedPeer:
    """From a certificate's alternative names of all kinds: those that are no roles are left out."""
    return CertifiedPeer(tuple(role for name in names if (role := _role(name)) is not None))


def _role(uri: str) -> Role | None:
    kind, slash, name = uri.removeprefix(SCHEME).partition("/")
    if not uri.startswith(SCHEME) or (kind == MASTER) == bool(slash) or kind not in (MASTER, NODE, CLIENT):
        return None
    meant = unquote(name)
    return Role(kind, meant) if meant != ANY or name == ANY else None  # an encoded * is no wildcard


def check_has(peer: CertifiedPeer, kinds: Iterable[str], who: str) -> None:
    """Raises Untrusted unless the certificate has a role of one of these kinds. `who` it was taken for, in the error."""
    if not any(peer.has(kind) for kind in kinds):
        expected = " or ".join(Role(kind, "NAME").uri() for kind in kinds)
        raise Untrusted(f"the certificate of {who} says {peer}, and {expected} is needed: make one for that role (kvstore certs)")


def check_hello(peer: CertifiedPeer | None, hello: Hello) -> None:
    """Whether who connected may call itself so. Without a certificate there is nothing to compare with. Raises Unauthorized."""
    if peer is None:
        return
    if hello.role == ROLE_NODE and not peer.is_a(NODE, hello.name):
        raise Unauthorized(f"the certificate says {peer}, and node {hello.name!r} introduces itself: make one for it (kvstore certs node)")
    if hello.role == ROLE_CLIENT and not peer.is_a(CLIENT, hello.tenant):
        raise Unauthorized(
            f"the certificate says {peer}, and a client of tenant {hello.tenant!r} introduces itself: make one for it (kvstore certs client)"
        )


def check_welcome(peer: CertifiedPeer | None, welcome: Welcome) -> None:
    """Whether who answers may call itself so. Raises Untrusted."""
    if peer is None:
        return
    if welcome.server == SERVER_MASTER and not peer.is_a(MASTER):
        raise Untrusted(f"the certificate says {peer}, and a master introduces itself: make one for it (kvstore certs master)")
    if welcome.server == SERVER_NODE and not peer.is_a(NODE, welcome.name):
        raise Untrusted(f"the certificate says {peer}, and node {welcome.name!r} introduces itself: make one for it (kvstore certs node)")
