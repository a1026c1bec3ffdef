"""Who somebody is, once he has shown it: of which kind, whose name he goes by, and what he may do at most.

A daemon makes an Identity of what a peer shows (credentials.py), keeps it with the peer's session, and asks permissions.py about it from
then on.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import Final


class Role(enum.IntEnum):
    """What a tenant's credential allows; each role includes those before it."""

    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3

    @classmethod
    def named(cls, name: str) -> "Role | None":
        """`read`, `write` or `admin`; None for any other text."""
        return next((role for role in cls if role and role.name.lower() == name), None)


class IdentityKind(enum.Enum):
    UNAUTHENTICATED = "a stranger"
    TENANT = "a tenant"
    OPERATOR = "an operator"
    NODE = "a node"
    INSTANCE = "an engine's instance"
    MASTER = "the master"
    ANONYMOUS = "anybody"


@dataclass(frozen=True, slots=True)
class Identity:
    """`name` is the tenant's, node's, instance's or operator's; of a node or an instance "" stands for any. `credential` names the token
    that was shown without telling it, for revoking it; `expires_s` is when that token ends, in seconds of Unix time. `certificate` is the
    fingerprint (tls/revoked.py) of the certificate that was shown, b"" of none: what is issued upon it ends when that is revoked."""

    kind: IdentityKind
    role: Role = Role.NONE
    name: str = ""
    credential: str = ""
    expires_s: float = math.inf
    certificate: bytes = field(default=b"", repr=False)

    def may_use_name(self, name: str) -> bool:
        """May this node or instance say that it is the one of this name?"""
        return self.kind is IdentityKind.ANONYMOUS or self.name in ("", name)

    def is_tenant(self, name: str) -> bool:
        """May this one act as the tenant of this name?"""
        return self.kind is IdentityKind.ANONYMOUS or (self.kind is IdentityKind.TENANT and self.name == name)

    @property
    def is_admin(self) -> bool:
        """May this one see, and change, what belongs to no tenant?"""
        return self.role is Role.ADMIN

    def __str__(self) -> str:
        """As messages tell of it: `tenant 'red' with role read`, `node 'n1'`, `a stranger`."""
        if self.kind is IdentityKind.TENANT:
            return f"tenant {self.name!r} with role {self.role.name.lower()}"
        return f"{self.kind.value.split()[-1]} {self.name!r}" if self.name else self.kind.value


UNAUTHENTICATED: Final = Identity(IdentityKind.UNAUTHENTICATED)
"""Who has not shown who he is."""
MASTER: Final = Identity(IdentityKind.MASTER)
"""The master that a node has registered with, over the connection that the node made."""
PEER_MASTER: Final = Identity(IdentityKind.MASTER, Role.ADMIN)
"""Another master of the same cluster, for a master: it asks on behalf of operators whom it has let in."""
ANONYMOUS: Final = Identity(IdentityKind.ANONYMOUS, Role.ADMIN)
"""Whoever comes, where no credentials are configured."""
