"""Pins: blocks that clients keep from eviction and removal. They outlive the master, and the block's stay out of reach. Sans-I/O.

Keys are in Tenant.pins. A node hears of a block's pin when the block is pinned or let go (here), and when it publishes a pinned block
(publishing.py, replication.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.master.catalogs.interface import Op
from kvstore.master.directory import records
from kvstore.master.directory.commands import Commands
from kvstore.master.directory.queries import Queries
from kvstore.master.directory.rows import Rows
from kvstore.master.directory.tenants import Tenants


@dataclass(frozen=True, slots=True)
class Pinning:
    """A pin or unpin done. `flags` (1: the block is there) by key; `ops` for the catalog; `commands` for the nodes."""

    flags: bytes
    ops: list[Op]
    commands: Commands


class Pins:
    """See the module. Not thread-safe."""

    def __init__(self, rows: Rows, tenants: Tenants, queries: Queries, master_epoch: int) -> None:
        self._rows, self._tenants, self._queries = rows, tenants, queries
        self._master_epoch = master_epoch

    def pin(self, tenant: str, keys: Sequence[bytes], *, pinned: bool) -> Pinning:
        """Keep blocks that are there from eviction and removal, or let them go. Durable with the operations."""
        flags = self._queries.exists(tenant, keys)
        pinning = Pinning(flags, [], Commands(self._master_epoch))
        owner = self._tenants.of(tenant) if 1 in flags else self._tenants.asked(tenant)
        for key, flag in zip(keys, flags, strict=True):
            if pinned and flag:
                owner.pins.add(key)
            elif not pinned and key in owner.pins:
                owner.pins.remove(key)
            else:
                continue
            pinning.ops.append(records.pin(owner.prefix, key, pinned=pinned))
            for node_id in self._rows.readable_at(owner, key):
                pinning.commands.hold(node_id, owner, key, pinned=pinned)
        return pinning
