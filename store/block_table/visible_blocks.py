"""Visible blocks of a node by tenant and key, at most one per key, and the access counter."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from kvstore.store.block_table.block import Block
from kvstore.store.block_table.rows import Numbers, keys_of, write


class VisibleBlocks:
    """Index of visible blocks. Pure; it knows neither slots nor tiers."""

    def __init__(self) -> None:
        self._blocks: dict[str, dict[bytes, Block]] = {}
        """By tenant and key. No empty dicts."""
        self._count = 0
        self.accesses = 0
        """Number of accesses so far; the clock of `last_access`."""

    def find(self, tenant: str, key: bytes) -> Block | None:
        """Return the visible block of a key. Not an access."""
        of_tenant = self._blocks.get(tenant)
        return of_tenant.get(key) if of_tenant is not None else None

    def has_any(self, tenant: str, keys: Iterable[bytes]) -> bool:
        """Return True if one of the keys has a block."""
        of_tenant = self._blocks.get(tenant)
        return of_tenant is not None and not of_tenant.keys().isdisjoint(keys)

    def by_key(self, tenant: str) -> Mapping[bytes, Block]:
        """Return the blocks of a tenant that has some."""
        return self._blocks[tenant]

    def add(self, block: Block) -> None:
        """Add a block, which counts as an access. Its key must have no visible block."""
        of_tenant, columns = self._blocks.setdefault(block.tenant, {}), block.columns
        keys, parents = columns.keys, columns.parents
        of_tenant[keys[block]] = block
        self._count += 1
        if parents[block] and (above := of_tenant.get(parents[block])) is not None:
            parents[block] = keys[above]  # share the bytes object
        self.accesses = columns.last_accesses[block] = self.accesses + 1

    def add_all(self, blocks: Sequence[Block], rows: Numbers) -> None:
        """Add blocks of one tenant; `rows` are theirs; at least one."""
        of_tenant = self._blocks.setdefault(blocks[0].tenant, {})
        of_tenant.update(zip(keys_of(blocks), blocks, strict=True))
        keys, parents = blocks[0].columns.keys, blocks[0].columns.parents
        for block, parent in zip(blocks, map(parents.__getitem__, blocks), strict=True):
            if parent and (above := of_tenant.get(parent)) is not None:
                parents[block] = keys[above]
        count = len(blocks)
        write(blocks[0].columns.last_accesses, rows, np.arange(self.accesses + 1, self.accesses + 1 + count, dtype=np.uint64))
        self.accesses += count
        self._count += count

    def remove(self, block: Block) -> None:
        tenant = block.tenant
        of_tenant = self._blocks[tenant]
        del of_tenant[block.key]
        self._count -= 1
        if not of_tenant:
            del self._blocks[tenant]

    def remove_all(self, blocks: Sequence[Block]) -> None:
        """Remove blocks of one tenant; at least one."""
        of_tenant = self._blocks[blocks[0].tenant]
        for key in keys_of(blocks):
            del of_tenant[key]
        self._count -= len(blocks)
        if not of_tenant:
            del self._blocks[blocks[0].tenant]

    def access(self, block: Block) -> None:
        self.accesses = block.columns.last_accesses[block] = self.accesses + 1

    def of_tenant(self, tenant: str) -> list[Block]:
        return list(self._blocks.get(tenant, {}).values())

    def count_of(self, tenant: str) -> int:
        return len(self._blocks.get(tenant, ()))

    def tenants(self) -> set[str]:
        """Tenants with visible blocks."""
        return set(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        """Iterate over all blocks. They must not change meanwhile."""
        return chain.from_iterable(of_tenant.values() for of_tenant in self._blocks.values())

    def __len__(self) -> int:
        return self._count
