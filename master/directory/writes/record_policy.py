"""Which blocks have a record in the catalog, by the setting `records`, and the operations that keep it so. Sans-I/O.

ALL: every block, from before it is seen. OUTLIVING: those that outlive their node's process, for they are in NVMe, at several nodes, or
pinned; the record is written as that becomes so, and nobody waits for it. MEMBERSHIP: none; nodes, drains, pins, replica targets,
quotas and removals have theirs. What has none a restarted master knows once the block's node has told its inventory.

But for ALL it keeps a bit a row of whether there is a record, so that what never had one costs no deletion, and so that the records of a
former setting go as nodes tell of their blocks.
"""

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
"""What outlives a node's process."""


class RecordPolicy:
    """See the module. Not thread-safe."""

    def __init__(self, rows: Rows, choice: str) -> None:
        """`choice` is one of RECORDS."""
        self._rows = rows
        self._choice = choice
        self._left: set[tuple[str, bytes]] = set()
        """Tenant and key of blocks whose rows went and whose records are to be deleted."""

    @property
    def is_all(self) -> bool:
        """Every block has a record, and is seen only once that is durable."""
        return self._choice == ALL

    def count(self) -> int:
        """Blocks that have a record."""
        return self._rows.sets.held_blocks() if self.is_all else self._rows.recorded.count(1)

    def ops(self, tenant: Tenant, key: bytes) -> list[Change]:
        """What makes the catalog say what is known of the key now; with ALL commits in flight included."""
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
        """Tiers, or the pin, of a block have changed: operations where it gets a record for that, or has one no longer."""
        row = NO_ROW if self.is_all else tenant.rows.get(key, NO_ROW)
        if row == NO_ROW or self._is_worth_one(tenant, key, row) == self._rows.recorded[row]:
            return []
        return self.ops(tenant, key)

    def entered(self, tenant: Tenant, puts: BlockPuts, tiers: int) -> list[Change]:
        """As `ops`, of blocks without pins that have just got their rows, at one node and in the same tiers. With ALL they have records."""
        if self._choice != OUTLIVING or not tiers & DURABLE_TIERS:
            return []
        for row in tenant.rows.find(puts.keys).tolist():
            self._rows.recorded[row] = 1
        return [puts]

    def leaves(self, tenant: Tenant, key: bytes) -> None:
        """The row of the block is about to go: `ops` follows."""
        if not self.is_all and self._rows.recorded[tenant.rows.get(key, NO_ROW)]:
            self._left.add((tenant.name, key))

    def gone(self, tenant: Tenant, keys: Sequence[bytes], rows: Found) -> list[Change]:
        """As `leaves` and `ops`, of blocks whose rows go, of which nothing else is known."""
        if not self.is_all:
            is_recorded = np.frombuffer(self._rows.recorded, np.uint8)[rows]
            keys = list(compress(keys, is_recorded.tolist()))
        return [BlockDeletes(tenant.name, keys)] if keys else []

    def check_integrity(self) -> None:
        """Assert that no deletion was forgotten, and that what is worth a record has one. For tests; O(rows)."""
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
        # Of a bare hint, which came from a record, nobody knows the tiers until the node has told its inventory.
        return len(pairs) > 1 or bool(state & DURABLE_TIERS) or state == HINT or key in tenant.pins
