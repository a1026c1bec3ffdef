"""Blocks of retired namespaces (former weights), which are evicted before others of the same tenant and size class.

The master reports the namespaces. New blocks are marked when they are added; existing ones by a walk in slices. A
namespace that is used again needs no walk: each victim search checks again.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from kvstore.store.block_table.block import Block
from kvstore.store.block_table.tier_view import TierView
from kvstore.store.block_table.visible_blocks import VisibleBlocks

WALKED: Final = 4096
"""Blocks examined per step: about 3 ms."""


class RetiredBlocks:
    """Marks blocks of retired namespaces. Part of the block table; called from the node's loop."""

    def __init__(self, visible: VisibleBlocks, levels: Mapping[int, TierView]) -> None:
        self._visible = visible
        self._levels = levels
        self._namespaces: Mapping[str, frozenset[str]] = {}
        self._tenants: list[str] = []
        """Tenants whose blocks have not been walked."""
        self._left: list[Block] = []
        self._at = 0
        """Position in `_left`, the blocks of the tenant being walked, in the order of their puts."""

    def set(self, namespaces: Mapping[str, frozenset[str]]) -> None:
        """Replace the retired namespaces, by tenant."""
        before, self._namespaces = self._namespaces, namespaces
        for level in self._levels.values():
            level.order.is_retired = self.holds if namespaces else None
        added = [tenant for tenant, found in namespaces.items() if found - before.get(tenant, frozenset())]
        if added:
            waiting = {*self._tenants, *added, *(block.tenant for block in self._left[:1])}
            self._tenants, self._left, self._at = sorted(waiting & namespaces.keys()), [], 0

    def holds(self, block: Block) -> bool:
        """Return True if the block's namespace is retired."""
        columns = block.columns
        return columns.namespace in self._namespaces.get(columns.tenant, ())

    def step(self) -> bool:
        """Walk a slice of the blocks; return True if more are left."""
        if not self._left and self._tenants:
            self._left, self._at = self._visible.of_tenant(self._tenants.pop()), 0
        self._mark(self._left[self._at : self._at + WALKED])
        self._at += WALKED
        if self._at >= len(self._left):
            self._left = []
        return bool(self._left or self._tenants)

    def _mark(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if not block.is_dropped and self.holds(block):
                for index in block.tiers():
                    self._levels[index].order.retire(block, block.group_in(index))
