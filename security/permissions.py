"""Permission table: one rule for every frame type of a master and of a node, and for every RPC.

At start a daemon verifies with `check_complete` that everything it serves has a rule. For each session it gets the
permitted frame types once, from `allowed_frames`. Rules do not look into messages: the handler checks that keys, nodes
and names in a message belong to the identity.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from kvstore.protocol import catalog_messages as catalog
from kvstore.protocol import event_messages as event
from kvstore.protocol import master_messages as master
from kvstore.protocol import node_messages as node
from kvstore.protocol.errors import Denied, InvalidArgument, KVStoreError, Unauthorized
from kvstore.protocol.session_messages import Hello
from kvstore.security.identity import Identity, IdentityKind, Role

ACTIONS: Final = {
    "Lookup": "look blocks up",
    "Exists": "look blocks up",
    "MatchPrefix": "look blocks up",
    "Nodes": "look nodes up",
    "ReadBlocks": "read blocks",
    "MapSlabs": "read blocks in shared memory",
    "MapSlabs for writing": "put blocks",
    "OpenIndex": "read blocks in shared memory",
    "HoldBlocks": "hold blocks",
    "Prefetch": "prefetch blocks",
    "Retain": "send retention hints for blocks",
    "ReleaseSession": "end sessions of retention hints",
    "FetchEvents": "record what happens to blocks",
    "Reserve": "put blocks",
    "Put": "put blocks",
    "PutFromSlot": "put blocks",
    "OpenSlots": "put blocks",
    "OpenSlotAhead": "put blocks",
    "CommitPuts": "put blocks",
    "WaitCommitted": "put blocks",
    "Remove": "remove blocks",
    "RemoveMatching": "remove blocks by namespace or pattern",
    "Pin": "pin blocks",
    "PinFor": "pin blocks",
    "Replicate": "change the number of replicas",
    "Register": "join as a node",
    "Status": "see the cluster's status",
    "Topologies": "see the nodes' topologies",
    "Forget": "forget a node",
    "Drain": "drain a node",
    "SetQuota": "set quotas",
    "ClearQuota": "clear quotas",
    "ListKeys": "list keys",
    "Contents": "list namespaces",
    "ReportWeights": "report weights",
    "Weights": "list weights",
    "RetireWeights": "retire weights",
    "PinNamespace": "pin namespaces",
    "RemoveNamespace": "remove namespaces",
    "Report": "report an instance",
    "Leave": "report an instance",
    "Schedule": "have requests scheduled",
    "Instances": "list instances",
}
"""Phrases for errors, by name of the message or call. Messages between daemons have none; their names are used."""


@dataclass(frozen=True, slots=True)
class Permission:
    """Rule that permits identities of `kinds`, tenants from `role` on. `text`: the required credential, for errors."""

    text: str
    kinds: frozenset[IdentityKind]
    role: Role = Role.NONE

    def allows(self, identity: Identity) -> bool:
        if identity.kind is IdentityKind.ANONYMOUS:
            return self not in (COMMANDS, MASTERS)
        return identity.kind in self.kinds and (identity.kind is not IdentityKind.TENANT or identity.role >= self.role)


OPEN: Final = Permission("any peer", frozenset(IdentityKind))
KNOWN: Final = Permission("any valid credential", frozenset(IdentityKind) - {IdentityKind.UNAUTHENTICATED}, Role.READ)
READS: Final = Permission("a tenant's token with role read, write or admin", frozenset({IdentityKind.TENANT}), Role.READ)
WRITES: Final = Permission("a tenant's token with role write or admin", frozenset({IdentityKind.TENANT}), Role.WRITE)
MANAGES: Final = Permission(
    "a tenant's token with role write or admin, or one of [admins]", frozenset({IdentityKind.TENANT, IdentityKind.OPERATOR}), Role.WRITE
)
FETCHES: Final = Permission("a tenant's token, or a pass of a node", frozenset({IdentityKind.TENANT, IdentityKind.NODE}), Role.READ)
LISTS: Final = Permission("a token of the tenant or of [admins]", frozenset({IdentityKind.TENANT, IdentityKind.OPERATOR}), Role.READ)
OPERATES: Final = Permission(
    "a token of [admins], or a tenant's with role admin", frozenset({IdentityKind.TENANT, IdentityKind.OPERATOR}), Role.ADMIN
)
# For consoles of other masters, on behalf of operators that those masters have authenticated.
SHOWS: Final = Permission(LISTS.text, LISTS.kinds | {IdentityKind.MASTER}, LISTS.role)
SERVES: Final = Permission(OPERATES.text, OPERATES.kinds | {IdentityKind.MASTER}, OPERATES.role)
JOINS: Final = Permission(
    "a registered node, by its join token (the setting join_token, of the section [nodes])", frozenset({IdentityKind.NODE})
)
REPORTS: Final = Permission(
    "an instance's token (the setting instance_token, of the section [instances])",
    frozenset({IdentityKind.INSTANCE, IdentityKind.TENANT}),
    Role.ADMIN,
)
MASTERS: Final = Permission("another master of the cluster", frozenset({IdentityKind.MASTER}))
COMMANDS: Final = Permission("the master that this node is registered with", frozenset({IdentityKind.MASTER}))

MASTER_FRAMES: Final[Mapping[int, Permission]] = MappingProxyType(
    {
        Hello.TYPE: OPEN,
        master.Lookup.TYPE: READS,
        master.Exists.TYPE: LISTS,
        master.MatchPrefix.TYPE: READS,
        master.Nodes.TYPE: READS,
        master.Reserve.TYPE: WRITES,
        master.CancelReservations.TYPE: WRITES,
        master.Remove.TYPE: MANAGES,
        master.RemoveMatching.TYPE: MANAGES,
        master.Pin.TYPE: MANAGES,
        master.PinFor.TYPE: MANAGES,
        master.Replicate.TYPE: WRITES,
        catalog.Publish.TYPE: JOINS,
        catalog.Digests.TYPE: JOINS,
        catalog.CommitBlocks.TYPE: JOINS,
        catalog.CopyResult.TYPE: JOINS,
        catalog.QueryVictims.TYPE: JOINS,
        catalog.RequestCopy.TYPE: JOINS,
        catalog.Heartbeat.TYPE: JOINS,
    }
)
NODE_FRAMES: Final[Mapping[int, Permission]] = MappingProxyType(
    {
        Hello.TYPE: OPEN,
        node.ReadBlocks.TYPE: FETCHES,
        node.ReleaseLeases.TYPE: FETCHES,
        node.ExportSlabs.TYPE: FETCHES,
        node.MapSlabs.TYPE: READS,  # writable ones: WRITES
        node.OpenIndex.TYPE: READS,
        node.HoldBlocks.TYPE: READS,
        node.ReleaseHolds.TYPE: READS,
        node.Prefetch.TYPE: READS,
        node.Retain.TYPE: READS,  # of puts, or by a call of its own: WRITES
        node.ReleaseSession.TYPE: WRITES,
        event.FetchEvents.TYPE: READS,
        node.Put.TYPE: WRITES,
        node.OpenSlots.TYPE: WRITES,
        node.CommitPuts.TYPE: WRITES,
        node.OpenSlotAhead.TYPE: WRITES,
        node.PutFromSlot.TYPE: WRITES,
        node.AbortPuts.TYPE: WRITES,
        node.WaitCommitted.TYPE: WRITES,
        catalog.DeleteBlocks.TYPE: COMMANDS,
        catalog.SetPinned.TYPE: COMMANDS,
        catalog.CopyBlocks.TYPE: COMMANDS,
        catalog.SetDraining.TYPE: COMMANDS,
        catalog.TicketKey.TYPE: COMMANDS,
        catalog.RevokeCredentials.TYPE: COMMANDS,
        catalog.PrefetchBlocks.TYPE: COMMANDS,
        catalog.MarkSecondary.TYPE: COMMANDS,
    }
)
RPCS: Final[Mapping[str, Permission]] = MappingProxyType(
    {
        "/kvstore.v1.Control/Register": JOINS,
        "/kvstore.v1.Control/Status": KNOWN,
        "/kvstore.v1.Control/Topologies": SERVES,
        "/kvstore.v1.Control/Forget": SERVES,
        "/kvstore.v1.Control/Drain": SERVES,
        "/kvstore.v1.Control/SetQuota": SERVES,
        "/kvstore.v1.Control/ClearQuota": SERVES,
        "/kvstore.v1.Control/ListKeys": LISTS,
        "/kvstore.v1.Control/Contents": SHOWS,
        "/kvstore.v1.Control/ReportWeights": READS,
        "/kvstore.v1.Control/Weights": SHOWS,
        "/kvstore.v1.Control/RetireWeights": SERVES,
        "/kvstore.v1.Control/PinNamespace": SERVES,
        "/kvstore.v1.Control/RemoveNamespace": SERVES,
        "/kvstore.v1.Control/Audit": OPERATES,
        "/kvstore.v1.Control/RecordAudit": MASTERS,
        "/kvstore.v1.Control/Sessions": OPERATES,
        "/kvstore.v1.Control/EndSession": OPERATES,
        "/kvstore.v1.Control/Tokens": OPERATES,
        "/kvstore.v1.Control/SlowRequests": SERVES,
        "/kvstore.v1.Scheduler/Report": REPORTS,
        "/kvstore.v1.Scheduler/Leave": REPORTS,
        "/kvstore.v1.Scheduler/Schedule": READS,
        "/kvstore.v1.Scheduler/Instances": OPERATES,
        "/grpc.health.v1.Health/Check": OPEN,
        "/grpc.health.v1.Health/List": OPEN,
        "/grpc.health.v1.Health/Watch": OPEN,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": KNOWN,
    }
)


def check_complete(rules: Mapping[Any, Permission], served: Iterable[Any]) -> None:
    """Raises InvalidArgument, with the names, if anything is served without a rule."""
    if lacking := [str(what) for what in served if what not in rules]:
        raise InvalidArgument(f"no rule in security/permissions.py for {', '.join(lacking)}: add one")


def allowed_frames(frames: Mapping[int, Permission], identity: Identity) -> frozenset[int]:
    """Return the frame types of a table above that this identity may send."""
    return _allowed(frames is MASTER_FRAMES, identity.kind, identity.role)


@lru_cache(maxsize=64)
def _allowed(is_master: bool, kind: IdentityKind, role: Role) -> frozenset[int]:
    frames = MASTER_FRAMES if is_master else NODE_FRAMES
    return frozenset(number for number, rule in frames.items() if rule.allows(Identity(kind, role)))


def denial(rule: Permission, identity: Identity, what: str) -> KVStoreError:
    """Return the error of a refused message or call `what`: Unauthorized before authentication, else Denied."""
    if identity.kind is IdentityKind.UNAUTHENTICATED:
        return Unauthorized(requirement(rule, what))
    return Denied(f"{identity} may not {action_text(what)}: it needs {rule.text}")


def requirement(rule: Permission, what: str) -> str:
    """Return the text of the credential that `what` requires."""
    return f"{rule.text} is needed to {action_text(what)}"


def check(rule: Permission, identity: Identity, what: str) -> None:
    """Raises Unauthorized or Denied unless the rule permits the identity."""
    if not rule.allows(identity):
        raise denial(rule, identity, what)


def action_text(name: str) -> str:
    """Return the phrase after "may not"."""
    return ACTIONS.get(name, f"send {name}")
