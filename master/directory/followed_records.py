"""Records of a catalog as a follower has them, from which a directory starts at once. Sans-I/O.

A follower applies each change as it is made. At its election the block rows exist already, with hints as holders;
only small state is built from its records: nodes, descriptions, pins with an end, quotas. So a failover takes no
longer for ten million blocks than for ten."""

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
    NodeRecord,
    PinRecord,
    QuotaRecord,
    RemovedRecord,
    StoppedRecord,
    TargetRecord,
    UnknownNodesRecord,
)
from kvstore.master.directory.weights_records import NamespaceRecord, WeightsRecord
from kvstore.security.quotas.limits import NamedLimits

R = TypeVar("R")

KEPT: Final = (NodeRecord, DrainRecord, StoppedRecord, PinRecord, QuotaRecord, WeightsRecord, NamespaceRecord)
"""Records stored as they are until a directory is built. Of pins only those with an end, in wall clock; the others
are in Tenant.pins."""


class FollowedRecords:
    """The records of one catalog. `Directory` takes it over; it must not be used after that. Not thread-safe."""

    def __init__(self) -> None:
        self.tenants = Tenants()
        self.rows = Rows(self.tenants)
        self.unknown_nodes: UnknownNodesRecord | None = None
        self.last_generation = 0
        """Upper bound of all recorded and removed versions."""
        self.granted_generation = 0
        """Upper bound of all granted generations."""
        self.audit = AuditLog()
        self._kept: dict[type[object], dict[bytes, Any]] = {kind: {} for kind in KEPT}
        """By the record's key."""
        self._limits: Mapping[str, NamedLimits] | None = None
        """Limits set by operators; None after a change."""
        self._parts: dict[str, dict[bytes, DescriptionPart]] = {}
        """Parts of the description of each node."""

    def take(self, changes: Sequence[Change]) -> None:
        """Apply changes in order. Raises Corrupt for an invalid record."""
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

    def run_due(self) -> None:
        """Forget tenants without state."""
        self.tenants.forget_empty()

    def blocks(self) -> int:
        """Return the number of blocks with a record."""
        return self.rows.sets.held_blocks()

    def each(self, kind: type[R]) -> Iterator[R]:
        """Iterate over the records of a kind in KEPT; of pins those with an end."""
        return iter(self._kept[kind].values())

    def operator_quotas(self) -> Mapping[str, NamedLimits]:
        """Return the limits set by operators, by tenant; a new mapping after each change."""
        if self._limits is None:
            self._limits = {record.tenant: record.limits for record in self.each(QuotaRecord)}
        return self._limits

    def description(self, name: str) -> Description:
        """Return the last description of the node `name`. Raises Corrupt for one of another release."""
        return records.join_description(tuple(self._parts.get(name, {}).values()))

    def _delete_blocks(self, change: BlockDeletes) -> None:
        rows = self.tenants.lookup(change.tenant).rows
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
        elif isinstance(record, UnknownNodesRecord):
            self.unknown_nodes = record
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
            owner = self.tenants.lookup(tenant)
            (owner.pins if kind is PinRecord else owner.targets if kind is TargetRecord else owner.removed).pop(block, None)
        elif kind is DescriptionPart:
            name = records.described_by(key)
            parts = self._parts.get(name, {})
            parts.pop(key, None)
            if not parts:
                self._parts.pop(name, None)
