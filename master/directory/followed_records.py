"""The directory's records as a catalog tells of them, kept so that a directory stands on them at once. Sans-I/O.

A master that stands by takes in each change as it comes. When it is elected, the rows of the blocks are there already, held by hints, and
only what is small is made anew from its records: nodes, their descriptions, pins that end, quotas. So to take over
takes no longer for ten million blocks than for ten.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from kvstore.master.catalogs.interface import BlockDeletes, BlockPuts, Change
from kvstore.master.directory import records
from kvstore.master.directory.audit_log import AuditLog, is_audit
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.index.rows import Rows
from kvstore.master.directory.index.tenants import FOR_GOOD, Tenants
from kvstore.master.directory.records import (
    Description,
    DescriptionPart,
    DrainRecord,
    GrantedRecord,
    GuestsRecord,
    NodeRecord,
    PinRecord,
    QuotaRecord,
    RemovedRecord,
    StoppedRecord,
    TargetRecord,
)
from kvstore.master.directory.weights_records import NamespaceRecord, WeightsRecord
from kvstore.security.quotas.limits import NamedLimits

R = TypeVar("R")

KEPT: Final = (NodeRecord, DrainRecord, StoppedRecord, PinRecord, QuotaRecord, WeightsRecord, NamespaceRecord)
"""Kept as they are until a directory stands on them; of pins those that have an end, by the wall clock: others are in Tenant.pins."""


class FollowedRecords:
    """The records of one catalog. `Directory` takes it over, and it must not be used after that. Not thread-safe."""

    def __init__(self) -> None:
        self.tenants = Tenants()
        self.rows = Rows(self.tenants)
        self.strangers: GuestsRecord | None = None
        self.last_generation = 0
        """No version that was ever recorded or removed is newer."""
        self.granted_generation = 0
        """No owner has granted a newer one."""
        self.audit = AuditLog()
        self._kept: dict[type[object], dict[bytes, Any]] = {kind: {} for kind in KEPT}
        """By the record's key."""
        self._limits: Mapping[str, NamedLimits] | None = None
        """What operators have set; None: that has changed."""
        self._parts: dict[str, dict[bytes, DescriptionPart]] = {}
        """Of the description of each node."""

    def take(self, changes: Sequence[Change]) -> None:
        """Take in changes, in their order. Raises Corrupt for a record that is none."""
        for change in changes:
            if isinstance(change, BlockPuts):
                if change.keys:
                    self.last_generation = max(self.last_generation, max(change.generations))
                    self.rows.replay(self.tenants.of(change.tenant), change)
            elif isinstance(change, BlockDeletes):
                self._delete_blocks(change)
            elif is_audit(change.key):
                self.audit.take(change.key, change.value)
            elif change.value is None:
                self._delete(change.key)
            else:
                self._put(change.key, change.value)

    def tick(self) -> None:
        """Let time pass: tenants that have nothing any more are forgotten."""
        self.tenants.forget_empty()

    def blocks(self) -> int:
        """Blocks that have a record."""
        return self.rows.sets.held_blocks()

    def each(self, kind: type[R]) -> Iterator[R]:
        """Records of a kind of KEPT; of pins those that have an end."""
        return iter(self._kept[kind].values())

    def operator_quotas(self) -> Mapping[str, NamedLimits]:
        """What operators have set of tenants' limits, by tenant; another mapping after each change."""
        if self._limits is None:
            self._limits = {record.tenant: record.limits for record in self.each(QuotaRecord)}
        return self._limits

    def description(self, name: str) -> Description:
        """What the node `name` said last. Raises Corrupt for a description of another release."""
        return records.join_description(tuple(self._parts.get(name, {}).values()))

    def _delete_blocks(self, change: BlockDeletes) -> None:
        rows = self.tenants.asked(change.tenant).rows
        for key in change.keys:
            row = rows.get(key)
            if row != NO_ROW:
                self.rows.remove(row)

    def _put(self, key: bytes, value: bytes) -> None:
        record = records.decode(key, value)
        if isinstance(record, PinRecord):
            self._delete(key)
            if not record.until_ms:
                self.tenants.of(record.tenant).pins[record.key] = FOR_GOOD
                return
        if type(record) in self._kept:
            self._kept[type(record)][key] = record
            self._limits = None if isinstance(record, QuotaRecord) else self._limits
        elif isinstance(record, DescriptionPart):
            self._parts.setdefault(record.name, {})[key] = record
        elif isinstance(record, GuestsRecord):
            self.strangers = record
        elif isinstance(record, GrantedRecord):
            self.granted_generation = record.generation
        elif isinstance(record, TargetRecord):
            self.tenants.of(record.tenant).targets[record.key] = record.count
        elif isinstance(record, RemovedRecord):
            self.tenants.of(record.tenant).removed[record.key] = record.generation
            self.last_generation = max(self.last_generation, record.generation)

    def _delete(self, key: bytes) -> None:
        if key in self._kept[QuotaRecord]:
            self._limits = None
        for kept in self._kept.values():
            kept.pop(key, None)
        kind = records.KINDS.get(key[:1])
        if kind in (PinRecord, TargetRecord, RemovedRecord):
            tenant, block = records.block_of(key)
            owner = self.tenants.asked(tenant)
            (owner.pins if kind is PinRecord else owner.targets if kind is TargetRecord else owner.removed).pop(block, None)
        elif kind is DescriptionPart:
            name = records.described_by(key)
            parts = self._parts.get(name, {})
            parts.pop(key, None)
            if not parts:
                self._parts.pop(name, None)
