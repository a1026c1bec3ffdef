"""Builders for tests of the directory: tiers, nodes and Publish messages in one short call each."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from kvstore.master.catalogs.interface import BlockPuts, Change, Op
from kvstore.master.directory.bounds import DirectoryLimits
from kvstore.master.directory.directory import Directory
from kvstore.master.directory.followed_records import FollowedRecords
from kvstore.master.directory.limits.quotas import TenantShare
from kvstore.master.directory.membership.members import NodeInfo, NodeMember
from kvstore.master.directory.records import NO_DESCRIPTION, Description, tenant_prefix
from kvstore.master.directory.writes.record_policy import ALL
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import (
    EVENT_COMMIT,
    PHASE_STREAM,
    PHASE_SYNC,
    PHASE_SYNC_BEGIN,
    PHASE_SYNC_END,
    DeleteBlocks,
    Publish,
    SetPinned,
)
from kvstore.security.quotas.quota import NO_QUOTA, SHARED, Quota

S: Final = 1_000_000_000
DRAM, NVME = 2, 4
TENANT: Final = "red"


def tier_of(name: str = "dram", capacity_bytes: int = 1 << 30, used_bytes: int = 0, health: str = "ok") -> pb.TierStatus:
    """A tier as a node reports it."""
    return pb.TierStatus(name=name, capacity_bytes=capacity_bytes, used_bytes=used_bytes, health=health)


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a Publish."""

    key: bytes
    generation: int = 1
    kind: int = EVENT_COMMIT
    size: int = 100
    checksum: int = 7
    tiers: int = DRAM
    tenant: str = TENANT
    namespace: str = "ns"
    parent: bytes = b""


def publish(epoch: int, events: Iterable[Event], phase: int = PHASE_STREAM) -> Publish:
    rows = list(events)
    tenants, namespaces = sorted({row.tenant for row in rows}), sorted({row.namespace for row in rows})
    return Publish(
        epoch,
        phase,
        tenants,
        namespaces,
        [row.key for row in rows],
        bytes(row.kind for row in rows),
        [tenants.index(row.tenant) for row in rows],
        [namespaces.index(row.namespace) for row in rows],
        [row.size for row in rows],
        [row.checksum for row in rows],
        [row.generation for row in rows],
        bytes(row.tiers for row in rows),
        [row.parent for row in rows],
    )


class Master:
    """A Directory with the catalog that its operations make, `now_ns` included. Commits are durable at once unless told otherwise."""

    def __init__(
        self,
        epoch: int = 1,
        catalog: "dict[bytes, bytes | BlockPuts] | None" = None,
        limits: DirectoryLimits = DirectoryLimits(),  # noqa: B008 - frozen
        wall_ns: int | None = None,
        now_ns: int = 0,
        recorded: str = ALL,
        quota: Quota = NO_QUOTA,
    ) -> None:
        """`quota` is every tenant's."""
        self.epoch = epoch
        self.recorded = recorded
        self.now_ns = now_ns
        self.catalog: dict[bytes, bytes | BlockPuts] = dict(catalog or {})
        """Small records by their keys; a block's under b"b", the length of its tenant's name, that, and its key."""

        def share_of(_tenant: str, limit: int) -> TenantShare | None:
            whole: int | None = getattr(quota, SHARED[limit])
            return None if whole is None else TenantShare(whole, whole)

        followed = FollowedRecords()
        followed.take([_change(*item) for item in self.catalog.items()])
        self.directory = Directory(
            epoch,
            followed,
            replace(limits, recorded=recorded),
            wall_ns=1000 * epoch if wall_ns is None else wall_ns,
            now_ns=self.now_ns,
            rng=random.Random(1),
            share_of=share_of,
        )

    def commit(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if isinstance(change, BlockPuts):
                for block in zip(*change[1:], strict=True):
                    self.catalog[block_name(change.tenant, block[0])] = BlockPuts(change.tenant, *([value] for value in block))
            elif not isinstance(change, Op):
                for key in change.keys:
                    self.catalog.pop(block_name(change.tenant, key), None)
            elif change.value is None:
                self.catalog.pop(change.key, None)
            else:
                self.catalog[change.key] = change.value

    def block(self, key: bytes, tenant: str = TENANT) -> BlockPuts:
        """A block's record in the catalog."""
        record = self.catalog[block_name(tenant, key)]
        assert isinstance(record, BlockPuts)
        return record

    def register(self, name: str, instance: int = 1, *tiers: pb.TierStatus, description: Description = NO_DESCRIPTION) -> NodeMember:
        node, ops = self.directory.register(NodeInfo(name, instance, tcp=f"{name}:1"), tiers or (tier_of(),), self.now_ns, description)
        self.commit(ops)
        return node

    def publish(self, node: NodeMember, *events: Event, phase: int = PHASE_STREAM) -> list[tuple[int, DeleteBlocks | SetPinned]]:
        """Plan, commit and apply; the commands that came of it. The node obeys them."""
        plan = self.directory.plan_publish(node.node_id, publish(node.epoch, events, phase))
        self.directory.drops_acknowledged(plan)
        self.commit(plan.ops)
        effects = self.directory.apply(plan)
        self.commit(effects.ops)
        self.directory.check_integrity()
        return [*plan.commands.messages(), *effects.commands.messages()]

    def sync(self, node: NodeMember, *events: Event) -> list[tuple[int, DeleteBlocks | SetPinned]]:
        """A full inventory."""
        begin = self.publish(node, phase=PHASE_SYNC_BEGIN)
        return [*begin, *self.publish(node, *events, phase=PHASE_SYNC), *self.publish(node, phase=PHASE_SYNC_END)]

    def remove(self, *keys: bytes, force: bool = False) -> list[int]:
        """Remove at holders that obey; 1 for each key that was there and is gone."""
        removal = self.directory.removing.plan(TENANT, keys, force=force)
        self.commit(removal.ops)
        if removal.raises_horizons:
            self.commit(self.directory.horizons_written())
        for node_id, drop in removal.commands.messages():
            assert isinstance(drop, DeleteBlocks)
            self.commit(self.directory.removing.dropped(node_id, TENANT, drop.keys, drop.generations, bytes((1,)) * len(drop.keys)))
        self.directory.removing.over(TENANT, removal)
        self.directory.check_integrity()
        left = self.exists(*keys)
        return [int(was and not still) for was, still in zip(removal.flags, left, strict=True)]

    def forget(self, name: str) -> None:
        _node, ops = self.directory.forget(name)
        self.commit(ops)
        self.commit(self.directory.horizons_written())

    def delete_unheld(self) -> None:
        for _ in range(3):
            self.commit(self.directory.delete_unheld(1 << 20))
        self.directory.check_integrity()

    def exists(self, *keys: bytes, tenant: str = TENANT) -> list[int]:
        return list(self.directory.queries.exists(tenant, keys))

    def restart(self) -> "Master":
        """A new master on the same catalog."""
        return Master(self.epoch + 1, self.catalog, recorded=self.recorded)


def block_name(tenant: str, key: bytes) -> bytes:
    return b"b" + tenant_prefix(tenant) + key


def _change(key: bytes, value: bytes | BlockPuts) -> Change:
    return value if isinstance(value, BlockPuts) else Op(key, value)


def one_node(*keys: bytes) -> tuple[Master, NodeMember]:
    master = Master()
    node = master.register("a")
    master.sync(node, *(Event(key) for key in keys))
    return master, node


def die(master: Master, node: NodeMember) -> None:
    master.directory.disconnected(node.node_id, node.epoch, master.now_ns)
