"""Author of a change in the audit trail: identity, address and interface."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from kvstore.security.identity import Identity, IdentityKind

CONTROL: Final = "control"
"""The control plane: the command line, and programs that call it."""
CONSOLE: Final = "console"
CLIENT: Final = "client"
"""Frames of the client library, and of commands that use it."""
HTTP: Final = "http"
FILE: Final = "file"
"""A settings file that changed on the master's disk."""
MASTER: Final = "master"
"""The master itself."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Author of a change; a field is "" if unknown.

    `kind`: of the identity. `name`: of its token or certificate. `credential`: id of its token. `peer`: address without
    a port. `via`: one of the constants above.
    """

    kind: str
    name: str = ""
    credential: str = ""
    peer: str = ""
    via: str = ""

    @classmethod
    def of(cls, identity: Identity, *, peer: str, via: str) -> "Actor":
        return cls(kind_of(identity), identity.name, identity.credential, peer, via)

    @classmethod
    def from_dict(cls, fields: Any) -> "Actor":
        """Inverse of `to_dict`. Raises ValueError for anything else."""
        if not isinstance(fields, dict) or set(fields) != set(cls.__slots__) or not all(isinstance(text, str) for text in fields.values()):
            raise ValueError("not an actor")
        return cls(**fields)

    def to_dict(self) -> dict[str, str]:
        """Return the fields, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """`operator alice from 10.0.0.7`."""
        return " ".join(part for part in (self.kind, self.name) if part) + (f" from {self.peer}" if self.peer else "")


THIS_MASTER: Final = Actor("master", via=MASTER)
"""Actor of changes that the master makes without a request."""


def kind_of(identity: Identity) -> str:
    """Return one word: operator, tenant, node, instance, master, anonymous, unauthenticated."""
    if identity.kind is IdentityKind.UNAUTHENTICATED:
        return "unauthenticated"
    return (
        "operator" if identity.kind is IdentityKind.TENANT and not identity.name and identity.is_admin else identity.kind.value.split()[-1]
    )


def host_of(address: str) -> str:
    """Return the host of a gRPC peer (`ipv4:10.0.0.7:5`, `ipv6:%5B::1%5D:5`) or of HOST:PORT; `unix:uid 1000` of
    `unix:uid 1000 pid 7`.
    """
    family, _, rest = address.partition(":")
    if family == "unix":
        return address.partition(" pid")[0]
    hostport = rest if family in ("ipv4", "ipv6") else address
    return hostport.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
