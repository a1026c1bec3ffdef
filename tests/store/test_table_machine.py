"""The block table against a naive model, over real tiers, in any order of events: bytes, slots, capacity and what the master hears."""

import tempfile
from pathlib import Path
from typing import Any

import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.protocol.catalog_messages import EVENT_COMMIT, EVENT_GONE
from kvstore.store.block import DRAM, HBM, NVME, Block
from kvstore.store.level import is_evictable
from kvstore.store.open_puts import Put
from kvstore.store.table import Move
from kvstore.tiers.tier import Record, Slot
from tests.store.tables import PUT_TTL_NS, RemoteWriter, Store, value_of

KEYS = st.sampled_from("abcdefgh")
TENANTS = st.sampled_from(["red", "blue"])
SIZES = st.sampled_from([100, 100, 100, 250, 700])
OWNERS = st.sampled_from(["one", "two"])
PICK = st.integers(0, 1 << 16)


class TableMachine(RuleBasedStateMachine):
    """Writers write when they like, also after their put expired; readers look again before they let go; copies end late or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.now_ns = 0
        self.puts: list[Put] = []
        self.expired: list[tuple[Put, memoryview]] = []
        self.remote: list[RemoteWriter] = []
        """Writers on other hosts of puts that are open, or over while something is still being written."""
        self.lingering: list[RemoteWriter] = []
        """Those of them whose puts are over."""
        self.readers: list[tuple[Block, memoryview | None]] = []
        self.moves: list[tuple[Move, memoryview | None]] = []
        self.promotions: list[tuple[Block, int, Slot]] = []
        self.visible: dict[tuple[str, str], Block] = {}
        self.heard: dict[Block, int] = {}

    @initialize(
        policy=st.sampled_from(["lru", "lfu", "sieve"]),
        hbm_bytes=st.sampled_from([0, 300]),
        nvme_bytes=st.sampled_from([0, 600, 20_000]),
        slab_bytes=st.sampled_from([100, 500, 4096]),
        high=st.sampled_from([1.0, 0.6]),
    )
    def start(self, policy: str, hbm_bytes: int, nvme_bytes: int, slab_bytes: int, high: float) -> None:
        self.has_nvme, self.nvme_is_large = bool(nvme_bytes), nvme_bytes > 10_000
        self.was_suspended = False
        self.store = Store(
            1200,
            hbm_bytes=hbm_bytes,
            nvme_bytes=nvme_bytes,
            folder=Path(self.folder.name),
            slab_bytes=slab_bytes,
            policy=policy,
            high=high,
            low=high / 2,
        )
        self.table = self.store.table

    # --- writers ---

    @rule(key=KEYS, tenant=TENANTS, size_bytes=SIZES, owner=OWNERS, is_remote=st.booleans())
    def open(self, key: str, tenant: str, size_bytes: int, owner: str, is_remote: bool) -> None:
        if self.table.find(tenant, key.encode()) is None and self.table.writer(tenant, key.encode()) is None:
            put = self.store.open(key, size_bytes, tenant=tenant, owner=owner, now_ns=self.now_ns)
            if put is not None:
                self.puts.append(put)
                if is_remote:
                    put.grant = RemoteWriter(self.store.dram.view(put.slot))
                    self.remote.append(put.grant)
            self.hear()

    @precondition(lambda self: self.remote)
    @rule(pick=PICK, begins=st.booleans())
    def write_remotely(self, pick: int, begins: bool) -> None:
        writer = self.remote[pick % len(self.remote)]
        writer.begin() if begins else writer.end()

    def over(self, puts: list[Put]) -> None:
        """These puts have ended, or are just about to."""
        for put in puts:
            if put.grant is not None:
                assert isinstance(put.grant, RemoteWriter)
                self.remote.remove(put.grant)
                if put.grant.under_way:
                    self.lingering.append(put.grant)
                    self.remote.append(put.grant)

    @precondition(lambda self: self.puts)
    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        put = self.puts.pop(pick % len(self.puts))
        self.over([put])
        if put.grant is not None and not put.grant.revoke():  # as the node's service does
            self.table.abort(put)
            return
        block = self.store.commit(put)
        self.visible[block.tenant, block.key.decode()] = block
        self.hear()

    @precondition(lambda self: self.puts)
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        put = self.puts.pop(pick % len(self.puts))
        self.over([put])
        self.table.abort(put)

    @rule(step_ns=st.sampled_from([1, PUT_TTL_NS // 2, PUT_TTL_NS]))
    def expire(self, step_ns: int) -> None:
        self.now_ns += step_ns
        late = [put for put in self.puts if put.expires_ns <= self.now_ns]
        self.lingering = [writer for writer in self.lingering if writer.under_way]
        self.remote = [writer for writer in self.remote if not writer.is_revoked or writer.under_way]
        self.over(late)
        self.expired += [(put, self.store.dram.view(put.slot)) for put in late if put.grant is None]
        self.puts = [put for put in self.puts if put not in late]
        assert self.table.expire(now_ns=self.now_ns) == len(late)

    @precondition(lambda self: self.expired)
    @rule(pick=PICK)
    def settle(self, pick: int) -> None:
        put, _view = self.expired.pop(pick % len(self.expired))
        self.table.settle(put.put_id, put.owner)

    @rule(owner=OWNERS)
    def forget_owner(self, owner: str) -> None:
        self.over([put for put in self.puts if put.owner == owner])
        self.table.forget_owner(owner)
        self.puts = [put for put in self.puts if put.owner != owner]
        self.expired = [entry for entry in self.expired if entry[0].owner != owner]

    # --- readers ---

    @rule(key=KEYS, tenant=TENANTS)
    def read(self, key: str, tenant: str) -> None:
        block = self.table.read(tenant, key.encode(), 0)
        assert block is self.visible.get((tenant, key))
        if block is not None:
            self.table.acquire(block)
            slot = block.slots[DRAM]
            self.readers.append((block, self.store.dram.view(slot) if slot is not None else None))
            if slot is not None:
                self.table.warm(block)
            elif self.table.wants_promotion(block):
                self.promote(block)
            self.hear()

    def promote(self, block: Block) -> None:
        tier = block.fastest()
        assert tier is not None
        slot = self.table.begin_promotion(block)
        if slot is not None:
            data = self.store.bytes_of(block, tier)
            assert data is not None
            self.store.dram.view(slot)[:] = data
            self.table.acquire(block)
            self.promotions.append((block, tier, slot))

    @precondition(lambda self: self.readers)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        block, view = self.readers.pop(pick % len(self.readers))
        assert view is None or bytes(view) == value_of(block), "the slot was reused under a reader"
        self.table.release(block)

    @precondition(lambda self: self.promotions)
    @rule(pick=PICK, is_done=st.booleans())
    def end_promotion(self, pick: int, is_done: bool) -> None:
        block, tier, slot = self.promotions.pop(pick % len(self.promotions))
        self.table.finish_move(block, tier, DRAM, slot, is_done=is_done)
        self.table.release(block)
        self.hear()

    # --- what else happens ---

    @precondition(lambda self: self.visible)
    @rule(pick=PICK)
    def drop(self, pick: int) -> None:
        block = list(self.visible.values())[pick % len(self.visible)]
        del self.visible[block.tenant, block.key.decode()]
        self.table.drop(block)
        self.hear()

    @precondition(lambda self: self.visible)
    @rule(pick=PICK)
    def lose_the_nvme_copy(self, pick: int) -> None:
        block = list(self.visible.values())[pick % len(self.visible)]
        if block.tier_mask() == 4:
            del self.visible[block.tenant, block.key.decode()]
        self.table.drop_copy(block, NVME)
        self.hear()

    @precondition(lambda self: self.visible)
    @rule(pick=PICK, pinned=st.booleans())
    def pin(self, pick: int, pinned: bool) -> None:
        list(self.visible.values())[pick % len(self.visible)].pinned = pinned

    @rule(index=st.sampled_from([HBM, NVME]), is_suspended=st.booleans())
    def suspend(self, index: int, is_suspended: bool) -> None:
        if index in self.store.tiers:
            self.table.suspend(index, is_suspended=is_suspended)
            self.was_suspended |= index == NVME

    @rule()
    def relieve(self) -> None:
        self.table.relieve()
        self.hear()

    @rule()
    def take_moves(self) -> None:
        for move in self.table.take_moves():
            slot = move.block.slots[move.source]
            is_mappable = move.source == DRAM and not move.block.is_gone and slot is not None
            self.moves.append((move, self.store.dram.view(slot) if is_mappable and slot is not None else None))

    @precondition(lambda self: self.moves)
    @rule(pick=PICK, is_done=st.booleans())
    def end_move(self, pick: int, is_done: bool) -> None:
        move, view = self.moves.pop(pick % len(self.moves))
        data: Any = view
        if view is not None:
            assert bytes(view) == value_of(move.block), "the source was reused under its copy"
        elif move.block.is_gone:
            is_done = False
        else:
            data = self.store.bytes_of(move.block, move.source)
        if is_done:
            self.store.tiers[move.target].write_batch([Record(move.slot, data, move.block.checksum, move.block.tag())])
        self.table.finish_move(move.block, move.source, move.target, move.slot, is_done=is_done)
        self.hear()

    # --- what always holds ---

    def hear(self) -> None:
        """Follow the events as a master would; what was evicted leaves the model with them."""
        for kind, block, mask in self.store.events:
            if kind == EVENT_GONE:
                del self.heard[block]
                key = (block.tenant, block.key.decode())
                if self.visible.get(key) is block:
                    assert is_evictable(block), "evicted though it may not leave"
                    assert not self.nvme_is_large or self.was_suspended, "lost though NVMe has room"
                    del self.visible[key]
            else:
                assert (kind == EVENT_COMMIT) == (block not in self.heard)
                self.heard[block] = mask
        self.store.events.clear()

    @invariant()
    def every_copy_of_every_visible_block_has_its_bytes(self) -> None:
        for _put, view in self.expired:
            view[:] = b"\xff" * len(view)
        for writer in self.remote:
            writer.scribble()
        assert {(block.tenant, block.key.decode()): block for block in self.table.blocks()} == self.visible
        for block in self.visible.values():
            assert block.checksum == xxhash.xxh3_64_intdigest(value_of(block))
            for tier in self.store.tiers:
                assert self.store.bytes_of(block, tier) in (None, value_of(block))

    @invariant()
    def the_master_would_know_exactly_what_is_there(self) -> None:
        assert self.heard == {block: block.tier_mask() for block in self.visible.values()}

    @invariant()
    def slots_add_up(self) -> None:
        self.table.check_integrity()
        dram = self.store.dram
        moves = [move for move, _ in self.moves] + self.table._moves
        held = {block for block, _ in self.readers} | {move.block for move in moves} | {block for block, _, _ in self.promotions}
        waiting = sum(block.slots[DRAM] is not None for block in held if block.is_gone)
        assert (dram.quarantined_bytes > 0) == bool(waiting + len(self.expired) + len(self.lingering))
        assert self.table.open_puts == len(self.puts)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.all_is_free_in_the_end()
            self.store.close()
        self.folder.cleanup()

    def all_is_free_in_the_end(self) -> None:
        self.take_moves()
        for move, _ in self.moves:
            self.table.finish_move(move.block, move.source, move.target, move.slot, is_done=False)
        for block, tier, slot in self.promotions:
            self.table.finish_move(block, tier, DRAM, slot, is_done=False)
            self.table.release(block)
        for block, _ in self.readers:
            self.table.release(block)
        for owner in ("one", "two"):
            self.forget_owner(owner)
        for writer in self.lingering:
            writer.under_way = 0
        self.table.expire(now_ns=self.now_ns)
        for block in list(self.table.blocks()):
            self.table.drop(block)
        for one in self.store.tiers.values():
            assert one.used_bytes == one.quarantined_bytes == 0


TableMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestTable = TableMachine.TestCase
