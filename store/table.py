"""The block table: what a node holds, where, and what must leave for something new. Pure bookkeeping over the tiers.

It owns every slot of every tier and all Block objects. It copies nothing and waits for nothing: a copy between tiers is planned
here (`take_moves`), made by the mover in a worker thread, and recorded here when it is done (`finish_move`). `now_ns` is passed in.
The node's loop is the only caller.

A block is visible from `commit` until it is dropped. At most one block a key is visible, and at most one writer a key is at work.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.protocol.messages import EVENT_COMMIT, EVENT_GONE, EVENT_MOVED
from kvstore.store.block import DRAM, HBM, NVME, Block
from kvstore.store.eviction import EvictionOrder
from kvstore.tiers.policy import EvictionPolicy
from kvstore.tiers.tier import Slot, Tier, TierFull

PROMOTE_AT_HITS = 2
"""A block below DRAM is copied up on its second hit there: 76 % of a production trace's blocks are read at most once more."""

Emit = Callable[[int, Block], None]
"""Called with (EVENT_..., block) for everything the master must hear, in order."""


@dataclass(slots=True, eq=False)
class Put:
    """An open put: the block it will make visible, and until when. Its bytes are undefined until the writer says `commit`."""

    put_id: int
    block: Block
    owner: object
    expires_ns: int


@dataclass(slots=True)
class Move:
    """A planned copy of `block` from one tier to another; `block.moving` is set until `finish_move`."""

    block: Block
    source: int
    target: int
    slot: Slot


@dataclass(slots=True)
class TierCounts:
    """What happened in one tier since the node started."""

    hits: int = 0
    evictions: int = 0
    demotions: int = 0
    promotions: int = 0


@dataclass(slots=True)
class _Level:
    tier: Tier
    order: EvictionOrder
    counts: TierCounts = field(default_factory=TierCounts)
    blocks: int = 0
    leaving_bytes: int = 0
    by_slot: dict[int, Block] = field(default_factory=dict)


class BlockTable:
    """See the module."""

    def __init__(
        self,
        tiers: dict[int, Tier],
        *,
        make_policy: Callable[[], EvictionPolicy[Block]],
        emit: Emit,
        put_ttl_ns: int,
        high_watermark: float,
        low_watermark: float,
    ) -> None:
        """`tiers` by index (HBM, DRAM, NVME); DRAM is where puts land and must be there."""
        self._levels = {index: _Level(tier, EvictionOrder(make_policy)) for index, tier in sorted(tiers.items())}
        self._landing = self._levels[DRAM]
        self._emit = emit
        self._put_ttl_ns = put_ttl_ns
        self._high, self._low = high_watermark, low_watermark
        self._blocks: dict[str, dict[bytes, Block]] = {}
        self._writers: dict[tuple[str, bytes], Put] = {}
        self._puts: dict[int, Put] = {}
        self._expiry: deque[Put] = deque()
        self._next_put_id = 1
        self._clock = 0
        self._moves: list[Move] = []
        self._stranded: dict[object, list[Slot]] = {}
        self._suspended: set[int] = set()
        self.misses = 0
        self.corrupt_reads = 0

    # --- puts ---

    def find(self, tenant: str, key: bytes) -> Block | None:
        """The visible block of a key; not an access."""
        of_tenant = self._blocks.get(tenant)
        return of_tenant.get(key) if of_tenant is not None else None

    def writer(self, tenant: str, key: bytes) -> Put | None:
        """The put at work on a key, if any."""
        return self._writers.get((tenant, key))

    def open(self, block: Block, owner: object, *, now_ns: int) -> Put | None:
        """Give `block` a slot in DRAM and make it this key's put; the key must be neither visible nor being written.

        None when there is no room now: room is being made if it can be (see `take_moves`), ask again when a move has finished.
        Raises InvalidArgument for a size DRAM can never hold.
        """
        assert (block.tenant, block.key) not in self._writers
        slot = self._make_room(DRAM, block.size_bytes, block.tenant)
        if slot is None:
            return None
        block.slots[DRAM] = slot
        put = Put(self._next_put_id, block, owner, now_ns + self._put_ttl_ns)
        self._next_put_id += 1
        self._puts[put.put_id] = self._writers[block.tenant, block.key] = put
        self._expiry.append(put)
        return put

    def put(self, put_id: int, owner: object) -> Put | None:
        """The open put of that id, if it is `owner`'s."""
        put = self._puts.get(put_id)
        return put if put is not None and put.owner is owner else None

    def commit(self, put: Put, checksum: int) -> Block:
        """The slot holds the value: make it visible. A put that has been closed (committed, aborted, expired) must not come here."""
        self._close_put(put)
        block = put.block
        block.checksum = checksum
        self._blocks.setdefault(block.tenant, {})[block.key] = block
        self._add_copy(DRAM, block)
        self._clock += 1
        block.last_access = self._clock
        self._emit(EVENT_COMMIT, block)
        return block

    def abort(self, put: Put) -> None:
        """Forget the put and free its slot at once: nobody but the writer knew of it."""
        self._close_put(put)
        slot = put.block.slots[DRAM]
        assert slot is not None
        self._landing.tier.free(slot)

    def expire(self, *, now_ns: int) -> int:
        """Close the puts whose time is over; returns how many. Their slots wait for the writer's end (`forget_owner`): a stopped
        process that goes on may still write through its mapping, and must not write into another block."""
        count = 0
        while self._expiry and (self._expiry[0].put_id not in self._puts or self._expiry[0].expires_ns <= now_ns):
            put = self._expiry.popleft()
            slot = put.block.slots[DRAM]
            if put.put_id in self._puts and slot is not None:
                self._close_put(put)
                self._landing.tier.quarantine(slot)
                self._stranded.setdefault(put.owner, []).append(slot)
                count += 1
        return count

    def forget_owner(self, owner: object) -> None:
        """The writer is gone: its open puts are aborted, and the slots of its expired ones can be used again."""
        for put in [put for put in self._puts.values() if put.owner is owner]:
            self.abort(put)
        for slot in self._stranded.pop(owner, ()):
            self._landing.tier.release(slot)

    def _close_put(self, put: Put) -> None:
        del self._puts[put.put_id]
        del self._writers[put.block.tenant, put.block.key]

    # --- reads ---

    def read(self, tenant: str, key: bytes, generation: int) -> Block | None:
        """The block for a reader: an access. None for a miss, or when `generation` (0: any) is not the block's."""
        block = self.find(tenant, key)
        if block is None or (generation and generation != block.generation):
            self.misses += 1
            return None
        index = block.fastest()
        assert index is not None
        self._levels[index].counts.hits += 1
        block.hits += 1
        self._touch(block)
        return block

    def acquire(self, block: Block) -> None:
        """A reader starts: the block's slots stay as they are until `release`."""
        block.readers += 1

    def release(self, block: Block) -> None:
        """A reader is done. The last one of a block that is gone frees its slots."""
        block.readers -= 1
        if block.is_gone and not block.readers and not block.moving:
            self._free_slots(block)

    def wants_promotion(self, block: Block) -> bool:
        """Whether a block that is not in DRAM has been read often enough to be copied there."""
        return block.hits >= PROMOTE_AT_HITS and not block.moving and block.slots[DRAM] is None

    def begin_promotion(self, block: Block) -> Slot | None:
        """A DRAM slot to read the block into, or None if that would need waiting. `finish_move` ends it."""
        slot = self._make_room(DRAM, block.size_bytes, block.tenant, may_wait=False)
        if slot is not None:
            block.moving = True
        return slot

    def _touch(self, block: Block) -> None:
        self._clock += 1
        block.last_access = self._clock
        for index, slot in enumerate(block.slots):
            if slot is not None:
                self._levels[index].order.touch(block, slot.group)

    # --- leaving ---

    def drop(self, block: Block) -> None:
        """Make the block invisible and free its slots, or quarantine them until its readers are done."""
        del self._blocks[block.tenant][block.key]
        if not self._blocks[block.tenant]:
            del self._blocks[block.tenant]
        block.is_gone = True
        for index, slot in enumerate(block.slots):
            if slot is not None:
                self._forget_copy(index, block, slot)
                if block.readers or block.moving:
                    self._levels[index].tier.quarantine(slot)
        if not block.readers and not block.moving:
            self._free_slots(block, quarantined=False)
        self._emit(EVENT_GONE, block)

    def drop_copy(self, block: Block, index: int) -> None:
        """Give up one tier's copy of the block (a damaged one, say); the block goes with its last copy."""
        slot = block.slots[index]
        if block.is_gone or slot is None:
            return
        if sum(other is not None for other in block.slots) == 1:
            self.drop(block)
            return
        self._forget_copy(index, block, slot)
        block.slots[index] = None
        self._levels[index].tier.free(slot)
        self._emit(EVENT_MOVED, block)

    def _free_slots(self, block: Block, *, quarantined: bool = True) -> None:
        for index, slot in enumerate(block.slots):
            if slot is not None:
                tier = self._levels[index].tier
                if quarantined:
                    tier.release(slot)
                else:
                    tier.free(slot)
                block.slots[index] = None

    def _add_copy(self, index: int, block: Block) -> None:
        slot = block.slots[index]
        assert slot is not None
        level = self._levels[index]
        level.order.insert(block, slot.group)
        level.by_slot[slot.index] = block
        level.blocks += 1

    def _forget_copy(self, index: int, block: Block, slot: Slot) -> None:
        level = self._levels[index]
        level.order.remove(block, slot.group)
        del level.by_slot[slot.index]
        level.blocks -= 1

    # --- room ---

    def _make_room(self, index: int, size_bytes: int, tenant: str, *, may_wait: bool = True) -> Slot | None:
        """A slot in the tier, evicting until there is one. None: nothing can leave at once (demotions may have been planned)."""
        level = self._levels[index]
        while True:
            try:
                return level.tier.allocate(size_bytes, tenant=tenant)
            except TierFull:
                group = level.tier.group(size_bytes, tenant=tenant)
                victims = self._victims(level, index, group)
                if not victims:
                    return None
                if not may_wait and not all(self._can_leave_now(block, index) for block in victims):
                    return None
                waiting = [block for block in victims if not self._evict(block, index)]
                if waiting:
                    return None

    def _victims(self, level: _Level, index: int, group: int) -> list[Block]:
        """Who leaves for a newcomer of `group`: its own coldest block, or all blocks of the slab that another group owes it."""
        own = level.order.victim(group, _is_evictable)
        elsewhere = level.order.coldest_elsewhere(group, _is_evictable)
        if elsewhere is None:
            return [own] if own is not None else []
        slot = elsewhere.slots[index]
        assert slot is not None
        mates = [mate for mate in self._slab_mates(level, slot) if _is_evictable(mate)]
        if own is None:
            return mates
        if elsewhere.last_access < own.last_access:
            slab_bytes = sum(mate.size_bytes for mate in mates)
            if level.order.owe(group, own.size_bytes, slab_bytes):
                return mates
        return [own]

    def _slab_mates(self, level: _Level, slot: Slot) -> list[Block]:
        slots: Callable[[Slot], list[Slot]] = getattr(level.tier, "slab_slots", lambda only: [only])
        mates = (level.by_slot.get(mate.index) for mate in slots(slot))
        return [block for block in mates if block is not None]

    def _lower(self, index: int) -> int | None:
        """The next lower tier that takes values."""
        return next((lower for lower in (DRAM, NVME) if lower > index and lower in self._levels and self._is_healthy(lower)), None)

    def _is_healthy(self, index: int) -> bool:
        return index not in self._suspended and self._levels[index].tier.health == "ok"

    def suspend(self, index: int, *, is_suspended: bool) -> None:
        """While suspended a tier gets no new copies, as if it were not there: its device just refused one."""
        if is_suspended:
            self._suspended.add(index)
        else:
            self._suspended.discard(index)

    def _can_leave_now(self, block: Block, index: int) -> bool:
        has_other_copy = any(slot is not None for other, slot in enumerate(block.slots) if other != index)
        return has_other_copy or self._lower(index) is None

    def _evict(self, block: Block, index: int) -> bool:
        """Have the block leave the tier. True when its slot is free now, False when it has to be copied down first."""
        if any(slot is not None for other, slot in enumerate(block.slots) if other != index):
            self.drop_copy(block, index)
            return True
        lower = self._lower(index)
        if lower is not None and (self._plan_move(block, index, lower) or lower != NVME):
            return False
        self._levels[index].counts.evictions += 1
        self.drop(block)
        return True

    def _plan_move(self, block: Block, source: int, target: int) -> bool:
        try:
            slot = self._make_room(target, block.size_bytes, block.tenant, may_wait=target > source)
        except KVStoreError:  # larger than that tier, or it just failed
            return False
        if slot is None:
            return False
        block.moving = True
        if target > source:
            self._levels[source].leaving_bytes += block.size_bytes
        self._moves.append(Move(block, source, target, slot))
        return True

    def relieve(self) -> None:
        """Plan demotions from each tier above its high watermark down to the low one, counting those under way."""
        for index, level in self._levels.items():
            if self._lower(index) is not None and self._staying_bytes(level) > level.tier.capacity_bytes * self._high:
                self._relieve(index, level)

    def _relieve(self, index: int, level: _Level) -> None:
        staying_bytes = self._staying_bytes(level)
        while staying_bytes > level.tier.capacity_bytes * self._low:
            block = level.order.coldest(_is_evictable)
            if block is None:
                return
            self._evict(block, index)
            before_bytes, staying_bytes = staying_bytes, self._staying_bytes(level)
            if staying_bytes == before_bytes:
                return  # the tier below has to make room first

    @staticmethod
    def _staying_bytes(level: _Level) -> int:
        return level.tier.used_bytes - level.leaving_bytes

    def warm(self, block: Block) -> None:
        """Plan a copy of a DRAM block to HBM if it was read often enough, there is an HBM tier, and no waiting is needed."""
        if HBM in self._levels and block.hits >= PROMOTE_AT_HITS and block.slots[HBM] is None and not block.moving:
            self._plan_move(block, DRAM, HBM)

    def take_moves(self) -> list[Move]:
        """The copies planned since the last call, for the mover."""
        moves, self._moves = self._moves, []
        return moves

    def finish_move(self, block: Block, source: int, target: int, slot: Slot, *, is_done: bool) -> None:
        """A copy has been made, or could not be. A demoted block leaves its source unless it is being read again meanwhile."""
        block.moving = False
        if target > source:
            self._levels[source].leaving_bytes -= block.size_bytes
        if block.is_gone or not is_done:
            self._levels[target].tier.free(slot)
            if block.is_gone and not block.readers:
                self._free_slots(block)
            return
        block.slots[target] = slot
        block.hits = 0
        self._add_copy(target, block)
        if target < source:
            self._levels[target].counts.promotions += 1
        else:
            self._levels[source].counts.demotions += 1
            if not block.readers and not block.pinned:
                self.drop_copy(block, source)
                return
        self._emit(EVENT_MOVED, block)

    # --- the whole ---

    def recover(self, blocks: Iterable[Block]) -> int:
        """Take over blocks found in NVMe at start; returns how many. Of two with one key the higher generation stays."""
        level, count = self._levels[NVME], 0
        for block in blocks:
            slot = block.slots[NVME]
            assert slot is not None
            old = self.find(block.tenant, block.key)
            if old is not None:
                loser = min(old, block, key=lambda either: either.generation)
                if loser is block:
                    level.tier.free(slot)
                    continue
                self.drop(old)
            self._blocks.setdefault(block.tenant, {})[block.key] = block
            self._add_copy(NVME, block)
            self._clock += 1
            block.last_access = self._clock
            count += 1
        return count

    def blocks(self) -> Iterator[Block]:
        """Every visible block; the table must not change meanwhile."""
        for of_tenant in self._blocks.values():
            yield from of_tenant.values()

    def levels(self) -> Iterator[tuple[int, Tier, TierCounts, int]]:
        """(index, tier, counts, blocks) of each tier that is there."""
        for index, level in self._levels.items():
            yield index, level.tier, level.counts, level.blocks

    @property
    def open_puts(self) -> int:
        return len(self._puts)

    def check_room(self, size_bytes: int) -> None:
        """Raises InvalidArgument for a value that DRAM can never hold."""
        capacity = self._landing.tier.capacity_bytes
        if size_bytes > capacity:
            raise InvalidArgument(f"a value of {size_bytes} bytes is larger than this node's DRAM tier of {capacity} bytes")

    def check_integrity(self) -> None:
        """Assert that slots, orders and blocks agree. For tests; O(blocks)."""
        for index, level in self._levels.items():
            level.tier.check_integrity()
            level.order.check_integrity(index)
            holders = [block for block in self.blocks() if block.slots[index] is not None]
            assert len(holders) == level.blocks == len(level.order) == len(level.by_slot)
            for block in holders:
                slot = block.slots[index]
                assert slot is not None
                assert level.by_slot[slot.index] is block
            total = level.tier.used_bytes + level.tier.quarantined_bytes + level.tier.free_bytes
            assert total == level.tier.capacity_bytes
        for block in self.blocks():
            assert not block.is_gone
            assert block.fastest() is not None
        assert set(self._writers.values()) == set(self._puts.values())


def _is_evictable(block: Block) -> bool:
    return not (block.readers or block.pinned or block.moving)
