"""How many blocks a node knows at once, of all tenants and of each: where there are as many as may be, the coldest leaves for the next one.

It leaves the node from the lowest tier that has one, for what it takes is a place in the table. The block table is the only caller.
"""

from collections.abc import Callable, Mapping

from kvstore.store.blocks.block import Block
from kvstore.store.blocks.level import Level
from kvstore.store.blocks.open_puts import OpenPuts
from kvstore.store.blocks.quotas import BlockQuotas
from kvstore.store.blocks.room import SURPLUS_BLOCKS, Room
from kvstore.store.blocks.visible import VisibleBlocks


class Crowding:
    """See the module."""

    def __init__(
        self,
        visible: VisibleBlocks,
        puts: OpenPuts,
        levels: Mapping[int, Level],
        quotas: BlockQuotas,
        drop: Callable[[Block], None],
        room: Room,
        *,
        max_blocks: int | None,
    ) -> None:
        """`levels` by index, fastest first; `max_blocks` of all tenants together, None: any number."""
        self._visible = visible
        self._puts = puts
        self._lowest_first = list(levels.values())[::-1]
        self._quotas = quotas
        self._drop = drop
        self._room = room
        self._max_blocks = max_blocks
        self._in_vain: set[str] = set()
        """Tenants of whose surplus nothing could leave since the last `look_again`."""

    def at_most(self, tenant: str, count: int) -> int:
        """As many of so many blocks of the tenant as there is a place for now."""
        if self._max_blocks is not None:
            count = min(count, self._max_blocks - len(self._visible) - len(self._puts))
        left = self._quotas.blocks_left(tenant)
        return count if left is None else min(count, left)

    def may_know_one_more(self, tenant: str) -> bool:
        """Have blocks leave until there is a place for one of the tenant: its own where it has as many as it may. False: none
        can, or the tenant has more than it may and enough have left in this turn."""
        while (left := self._quotas.blocks_left(tenant)) is not None and left <= 0:
            if (left < 0 and not self._room.may_take(1)) or not self._evict_of(tenant):
                return False
        while self._max_blocks is not None and len(self._visible) + len(self._puts) >= self._max_blocks:
            has_left = self._evict(lambda level: level.order.coldest(level.may_leave_now()), for_quota=False)
            if not (has_left or any(self._room.holds_give_way(level, None) for level in self._lowest_first)):
                return False
        return True

    def take_surplus(self) -> None:
        """Blocks leave that are more than their tenant may have, SURPLUS_BLOCKS at most; the others by the next calls."""
        left = SURPLUS_BLOCKS
        for tenant in self._quotas.crowded - self._in_vain:
            while left and self._quotas.surplus_blocks(tenant) and self._evict_of(tenant):
                left -= 1
            if not self._quotas.surplus_blocks(tenant):
                self._quotas.crowded.discard(tenant)
            elif left:
                self._in_vain.add(tenant)

    def look_again(self) -> None:
        """As of Room."""
        self._in_vain.clear()

    def _evict_of(self, tenant: str) -> bool:
        return self._evict(lambda level: level.order.coldest_of(tenant, level.may_leave_now()), for_quota=True)

    def _evict(self, coldest: Callable[[Level], Block | None], *, for_quota: bool) -> bool:
        """Have the block leave that `coldest` gives of the lowest tier where there is one. False: there is none."""
        for level in self._lowest_first:
            block = coldest(level)
            if block is not None:
                level.counts.evict(block.last_access)
                if for_quota:
                    level.counts.quota_evictions += 1
                else:
                    level.counts.table_evictions += 1
                self._drop(block)
                return True
        return False
