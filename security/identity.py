"""Identity of an authenticated peer: kind, name and role.

A daemon makes it from the peer's credential (credentials.py), keeps it with the session, and checks it by
permissions.py.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import Final


class Role(enum.IntEnum):
    """Role of a tenant's credential; each includes those before it."""

    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3

    @classmethod
    def named(cls, name: str) -> "Role | None":
        """`read`, `write` or `admin`; None for any other text."""
        return next((role for role in cls if role and role.name.lower() == name), None)


class IdentityKind(enum.Enum):
    """Kind of a peer; values are words for error texts."""

    UNAUTHENTICATED = "an unauthenticated peer"
    TENANT = "a tenant"
    OPERATOR = "an operator"
    NODE = "a node"
    INSTANCE = "an engine's instance"
    MASTER = "the master"
    ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True)
class Identity:
    """Kind, name and role of a peer.

    - `name`: of the tenant, node, instance or operator; "" of a node or instance: any.
    - `credential`: id of the token, for revocation. `expires_s`: its expiry, Unix time.
    - `certificate`: fingerprint (tls/pem_files.py) of the certificate, b"" without one. Tickets issued for it end with
      its revocation.
    """

    kind: IdentityKind
    role: Role = Role.NONE
    name: str = ""
    credential: str = ""
    expires_s: float = math.inf
    certificate: bytes = field(default=b"", repr=False)

    def may_use_name(self, name: str) -> bool:
        """Return True if this node or instance may use the name."""
        return self.kind is IdentityKind.ANONYMOUS or self.name in ("", name)

    def is_tenant(self, name: str) -> bool:
        """Return True if this identity may act as the tenant."""
        return self.kind is IdentityKind.ANONYMOUS or (self.kind is IdentityKind.TENANT and self.name == name)

    @property
    def is_admin(self) -> bool:
        """True if this identity may see and change the cluster."""
        return self.role is Role.ADMIN

    def __str__(self) -> str:
        """`tenant 'red' with role read`, `node 'n1'`, `an unauthenticated peer`."""
        if self.kind is IdentityKind.TENANT:
            return f"tenant {self.name!r} with role {self.role.name.lower()}"
        return f"{self.kind.value.split()[-1]} {self.name!r}" if self.name else self.kind.value


UNAUTHENTICATED: Final = Identity(IdentityKind.UNAUTHENTICATED)
"""A peer without credentials yet."""
MASTER: Final = Identity(IdentityKind.MASTER)
"""For a node: the master of its registration, over the node's own connection."""
PEER_MASTER: Final = Identity(IdentityKind.MASTER, Role.ADMIN)
"""For a master: another master of the cluster, which calls on behalf of operators that it has authenticated."""
ANONYMOUS: Final = Identity(IdentityKind.ANONYMOUS, Role.ADMIN)
"""Every peer, if authentication is off."""
