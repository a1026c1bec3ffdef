"""Policy of which blocks have a record in the catalog, by the setting `records`, and the operations that maintain it.
Sans-I/O.

- ALL: every block, before it becomes visible.
- OUTLIVING: blocks that outlive their node's process, because they are in NVMe, at several nodes, or pinned. No request
  waits for the record.
- MEMBERSHIP: none; nodes, drains, pins, replica targets, quotas and removals have records in any case.

A restarted master learns of blocks without a record from their nodes' inventories. Unless it is ALL, one bit a row
tells if a record exists: so blocks without one need no deletion, and records of a former setting are deleted as
nodes report their blocks."""

from collections.abc import Sequence
from itertools import compress
from typing import Final

import numpy as np

from kvstore.master.catalogs.interface import BlockDeletes, BlockPuts, Change
from kvstore.master.directory import records
from kvstore.master.directory.index.holders import HINT
from kvstore.master.directory.index.key_index import Found
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.index.rows import Rows
from kvstore.master.directory.index.tenants import Tenant
from kvstore.protocol.message import TIER_BITS

ALL, OUTLIVING, MEMBERSHIP = "all", "outliving", "membership"
RECORDS: Final = (ALL, OUTLIVING, MEMBERSHIP)
DURABLE_TIERS: Final = TIER_BITS["nvme"]
"""Tiers that outlive a node's process."""


class RecordPolicy:
    """Decides which blocks have a record, and tracks which do. Not thread-safe."""

    def __init__(self, rows: Rows, choice: str) -> None:
        """`choice` is one of RECORDS."""
        self._rows = rows
        self._choice = choice
        self._left: set[tuple[str, bytes]] = set()
        """Tenant and key of removed rows whose records are to be deleted."""

    @property
    def is_all(self) -> bool:
        """True if every block has a record, and becomes visible only once that is durable."""
        return self._choice == ALL

    def count(self) -> int:
        """Return the number of blocks with a record."""
        return self._rows.sets.held_blocks() if self.is_all else self._rows.recorded.count(1)

    def ops(self, tenant: Tenant, key: bytes) -> list[Change]:
        """Return operations that bring the key's record up to date; with ALL also for pending commits."""
        if self.is_all:
            return [self._op_of_all(tenant, key)]
        row = tenant.rows.get(key, NO_ROW)
        if row != NO_ROW and self._is_worth_one(tenant, key, row):
            self._left.discard((tenant.name, key))
            self._rows.recorded[row] = 1
            return [records.put_block(tenant.name, key, self._rows.version(row), self._holders(row))]
        if not self._rows.recorded[row] and (tenant.name, key) not in self._left:
            return []
        self._left.discard((tenant.name, key))
        self._rows.recorded[row] = 0
        return [records.delete_block(tenant.name, key)]

    def settle(self, tenant: Tenant, key: bytes) -> list[Change]:
        """Return operations after a change of a block's tiers or pin, if it gains or loses its record."""
        row = NO_ROW if self.is_all else tenant.rows.get(key, NO_ROW)
        if row == NO_ROW or self._is_worth_one(tenant, key, row) == self._rows.recorded[row]:
            return []
        return self.ops(tenant, key)

    def entered(self, tenant: Tenant, puts: BlockPuts, tiers: int) -> list[Change]:
        """As `ops`, for blocks without pins that have just got rows, at one node and in the same tiers. With ALL
        they have records already."""
        if self._choice != OUTLIVING or not tiers & DURABLE_TIERS:
            return []
        for row in tenant.rows.find(puts.keys).tolist():
            self._rows.recorded[row] = 1
        return [puts]

    def before_removal(self, tenant: Tenant, key: bytes) -> None:
        """The block's row is about to be removed: call `ops` afterwards."""
        if not self.is_all and self._rows.recorded[tenant.rows.get(key, NO_ROW)]:
            self._left.add((tenant.name, key))

    def removed(self, tenant: Tenant, keys: Sequence[bytes], rows: Found) -> list[Change]:
        """As `before_removal` and `ops`, for blocks whose rows are removed, without pending commits."""
        if not self.is_all:
            is_recorded = np.frombuffer(self._rows.recorded, np.uint8)[rows]
            keys = list(compress(keys, is_recorded.tolist()))
        return [BlockDeletes(tenant.name, keys)] if keys else []

    def check_integrity(self) -> None:
        """Assert that no deletion is missing, and every block that should have a record has one. For tests; O(rows)."""
        assert not self._left
        if self._choice != OUTLIVING:
            return
        for tenant in self._rows.tenants:
            for key, row in tenant.rows.items():
                assert self._rows.recorded[row] or not self._is_worth_one(tenant, key, row), key

    def _op_of_all(self, tenant: Tenant, key: bytes) -> Change:
        row = tenant.rows.get(key, NO_ROW)
        version, holders = self._rows.version(row), self._holders(row)
        for waiting in tenant.pending[key]:
            if not holders or waiting.version.generation > version.generation:
                version, holders = waiting.version, [waiting.node_id]
            elif waiting.version[:3] == version[:3] and waiting.node_id not in holders:
                holders.append(waiting.node_id)
        return records.put_block(tenant.name, key, version, holders) if holders else records.delete_block(tenant.name, key)

    def _holders(self, row: int) -> list[int]:
        return [node_id for node_id, _state in self._rows.pairs(row)]

    def _is_worth_one(self, tenant: Tenant, key: bytes, row: int) -> bool:
        pairs = self._rows.pairs(row)
        if not pairs or self._choice == MEMBERSHIP:
            return False
        state = pairs[0][1]
        # The tiers of a bare hint, which came from a record, are unknown until the node's inventory.
        return len(pairs) > 1 or bool(state & DURABLE_TIERS) or state == HINT or key in tenant.pins
