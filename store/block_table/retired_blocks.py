"""Namespaces of retired weights, whose blocks a tier evicts before others of the same tenant and size class.

The master says which they are. Blocks that come in later are known as they come; those that are there are found by a walk, a slice at a
time. A namespace that is no longer retired needs no walk: who looks for a victim asks again.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from kvstore.store.block_table.block import Block
from kvstore.store.block_table.tier_view import TierView
from kvstore.store.block_table.visible_blocks import VisibleBlocks

WALKED: Final = 4096
"""Blocks looked at in one step: some 3 ms."""


class RetiredBlocks:
    """A part of the block table. The node's loop is the only caller."""

    def __init__(self, visible: VisibleBlocks, levels: Mapping[int, TierView]) -> None:
        self._visible = visible
        self._levels = levels
        self._namespaces: Mapping[str, frozenset[str]] = {}
        self._tenants: list[str] = []
        """Whose blocks are still to be walked."""
        self._left: list[Block] = []
        self._at = 0
        """Of the tenant that is walked now, in the order in which they were put, and how many were looked at."""

    def set(self, namespaces: Mapping[str, frozenset[str]]) -> None:
        """Retire these namespaces, by tenant, and no others."""
        before, self._namespaces = self._namespaces, namespaces
        for level in self._levels.values():
            level.order.is_retired = self.holds if namespaces else None
        added = [tenant for tenant, found in namespaces.items() if found - before.get(tenant, frozenset())]
        if added:
            waiting = {*self._tenants, *added, *(block.tenant for block in self._left[:1])}
            self._tenants, self._left, self._at = sorted(waiting & namespaces.keys()), [], 0

    def holds(self, block: Block) -> bool:
        """Whether the block's namespace is retired."""
        columns = block.columns
        return columns.namespace in self._namespaces.get(columns.tenant, ())

    def step(self) -> bool:
        """Walk a slice of the blocks; whether more is to be walked."""
        if not self._left and self._tenants:
            self._left, self._at = self._visible.of_tenant(self._tenants.pop()), 0
        self._mark(self._left[self._at : self._at + WALKED])
        self._at += WALKED
        if self._at >= len(self._left):
            self._left = []
        return bool(self._left or self._tenants)

    def _mark(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if not block.is_gone and self.holds(block):
                for index in block.tiers():
                    self._levels[index].order.retire(block, block.group_in(index))
