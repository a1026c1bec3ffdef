"""State machine: the block table against a naive model over real tiers, in any order of operations. Checks bytes,
slots, capacity and events."""

import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.client.local.reader_slots import Hazard
from kvstore.protocol.catalog_messages import EVENT_COMMIT, EVENT_REMOVED
from kvstore.security.quotas.quota import Quota, Quotas
from kvstore.store.block_table import table as table_module
from kvstore.store.block_table.block import DRAM, HBM, NVME, Block, Loss
from kvstore.store.block_table.evictor import TierMove
from kvstore.store.block_table.open_puts import OpenPut
from kvstore.store.block_table.quotas import NO_USE
from kvstore.store.block_table.tier_view import evictable_in
from kvstore.store.reads.read_request import stage
from kvstore.store.tiering.mover import MoveJob
from kvstore.tiers.tier import Slot
from kvstore.tiers.value_codec import make_codec
from tests.store.integrity import check
from tests.store.tables import PUT_TTL_NS, LocalClient, RemoteWriter, Store
from tests.store.tensors import after, tensor_value

KEYS = st.sampled_from("abcdefgh")
TENANTS = st.sampled_from(["red", "blue"])
SIZES = st.sampled_from([300, 300, 300, 700, 1500])
OWNERS = st.sampled_from(["one", "two"])
TENSOR = (1, 2, 1, 16, 16)
"""Shape of tensor values: 1,088 bytes, 640 of them by int8."""
CODECS = ("int8", "int4/16")
QUOTAS = st.builds(
    Quota,
    hbm_bytes=st.sampled_from([None, 700]),
    dram_bytes=st.sampled_from([None, 0, 700, 1500]),
    nvme_bytes=st.sampled_from([None, 0, 700]),
    blocks=st.sampled_from([None, 0, 2]),
    hbm_slabs=st.sampled_from([None, None, 1]),
    dram_slabs=st.sampled_from([None, None, 0, 1, 2]),
)
NUMBERS = st.integers(1, 4)
SEEDS = st.integers(0, 20)
PICK = st.integers(0, 1 << 16)


@pytest.mark.promise("codec-bounded")
@pytest.mark.promise("get-exact-bytes")
@pytest.mark.promise("holds-keep")
@pytest.mark.promise("no-partial-blocks")
@pytest.mark.promise("shm-reads-whole")
@pytest.mark.promise("slots-not-reused-early")
@pytest.mark.promise("space-accounted")
@pytest.mark.promise("tenant-quotas")
class TableMachine(RuleBasedStateMachine):
    """Writers write when they like, also after their put expired; readers look again before they let go; copies end late or fail.

    With a codec, tensor values are encoded on their way to NVMe, and the codec may change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.now_ns = 0
        self.putting, self.is_making_room_of_own = "", False
        """While a put of that tenant is opened that its quota has no room for."""
        self.puts: list[OpenPut] = []
        self.expired: list[tuple[OpenPut, memoryview]] = []
        self.remote: list[RemoteWriter] = []
        """Writers on other hosts of puts that are open, or over while something is still being written."""
        self.lingering: list[RemoteWriter] = []
        """Those of them whose puts are over."""
        self.readers: list[tuple[Block, memoryview | None, bytes]] = []
        """With the slot's memory, and what was in it."""
        self.moves: list[tuple[TierMove, MoveJob | None]] = []
        self.promotions: list[tuple[Block, int, Slot, Loss | None]] = []
        self.staged: list[tuple[Block, memoryview, bytes]] = []
        """Copies for one reader, with the slot's memory, and what was in it."""
        self.may_drop = False
        """While a put is opened for which blocks may leave that could go down."""
        self.clients: dict[str, LocalClient] = {}
        """One a tenant, or none at all."""
        self.looks: list[tuple[str, memoryview, bytes, Hazard]] = []
        """Views: tenant, the slot's memory, what was in it, and the hazard."""
        self.visible: dict[tuple[str, str], Block] = {}
        self.heard: dict[Block, int] = {}

    @initialize(
        policy=st.sampled_from(["lru", "lfu", "sieve"]),
        hbm_bytes=st.sampled_from([0, 1500]),
        nvme_bytes=st.sampled_from([0, 1400, 40_000]),
        slab_bytes=st.sampled_from([100, 1100, 4096]),
        high=st.sampled_from([1.0, 0.6]),
        codec=st.sampled_from(["none", "int8", "int8"]),
        has_clients=st.booleans(),
    )
    def start(self, policy: str, hbm_bytes: int, nvme_bytes: int, slab_bytes: int, high: float, codec: str, has_clients: bool) -> None:
        self.has_codec = codec != "none"
        self.has_nvme, self.nvme_is_large = bool(nvme_bytes), nvme_bytes > 20_000
        self.was_suspended = self.was_limited = False
        self.store = Store(
            3300,
            hbm_bytes=hbm_bytes,
            nvme_bytes=nvme_bytes,
            folder=Path(self.folder.name),
            slab_bytes=slab_bytes,
            policy=policy,
            high=high,
            low=high / 2,
            codec=codec,
            may_hold_all=True,
        )
        self.table = self.store.table
        if has_clients:
            self.clients = {tenant: self.store.client(tenant) for tenant in ("red", "blue")}

    # --- clients of this host ---

    @precondition(lambda self: self.clients)
    @rule(key=KEYS, tenant=TENANTS)
    def record_local_reads(self, key: str, tenant: str) -> None:
        block = self.visible.get((tenant, key))
        value = self.clients[tenant].read(key)
        assert (value is not None) == (block is not None and block.dram is not None)
        if block is not None and value is not None:
            assert value == self.store.bytes_of(block, DRAM)

    @rule()
    def count_what_was_read(self) -> None:
        self.store.shared_index.take_accesses(self.table.record_local_reads)
        self.hear()

    @precondition(lambda self: self.clients)
    @rule(key=KEYS, tenant=TENANTS)
    def look(self, key: str, tenant: str) -> None:
        found = self.clients[tenant].look(key)
        if found is not None:
            memory, hazard = found
            self.looks.append((tenant, memory, bytes(memory), hazard))

    @precondition(lambda self: self.looks)
    @rule(pick=PICK)
    def release_hazard(self, pick: int) -> None:
        tenant, _, _, hazard = self.looks.pop(pick % len(self.looks))
        self.clients[tenant].desk.release_hazard(hazard)
        self.store.shared_index.release_unprotected()

    # --- holds ---

    @precondition(lambda self: self.visible)
    @rule(pick=PICK, number=NUMBERS, length_ns=st.integers(1, 10 * PUT_TTL_NS), owner=OWNERS, is_unasked=st.booleans())
    def hold(self, pick: int, number: int, length_ns: int, owner: str, is_unasked: bool) -> None:
        """All blocks of a tenant that has some, as far as may be; unasked, by its client of this host."""
        tenant = list(self.visible.values())[pick % len(self.visible)].tenant
        names = [name for of_tenant, name in self.visible if of_tenant == tenant]
        if is_unasked and self.clients:
            self.store.shared_index.heartbeat(self.now_ns)
            self.clients[tenant].hold(names, number, self.now_ns + length_ns)
            return
        blocks = [self.visible[tenant, name] for name in names]
        held_before = {block for block in blocks if block.hold_bits}
        flags = self.store.holds.add(owner, tenant, number, blocks, until_ns=self.now_ns + length_ns, now_ns=self.now_ns)
        for block, is_held in zip(blocks, flags, strict=True):
            assert bool(block.hold_bits) == (is_held or block in held_before)

    @rule(tenant=TENANTS, number=NUMBERS, is_unasked=st.booleans())
    def release_hold(self, tenant: str, number: int, is_unasked: bool) -> None:
        if is_unasked and self.clients:
            self.clients[tenant].desk.release(number)
        else:
            self.store.holds.release(tenant, number)

    @invariant()
    def what_is_looked_at_stays_as_it_was(self) -> None:
        for _, memory, value, _ in self.looks:
            assert bytes(memory) == value

    @invariant()
    def what_is_shown_is_what_is_in_dram(self) -> None:
        for (tenant, key), block in self.visible.items():
            if self.clients:
                found, slot = self.clients[tenant].find(key), block.dram
                assert (found is None) == (slot is None)
                assert found is None or (found.size, found.checksum) == (block.size_bytes, block.checksum_in(DRAM))
        if hasattr(self, "store"):
            check(self.store.shared_index)

    # --- writers ---

    @rule(
        key=KEYS,
        tenant=TENANTS,
        size_bytes=SIZES,
        owner=OWNERS,
        is_remote=st.booleans(),
        is_tensor=st.booleans(),
        seed=SEEDS,
        may_drop=st.booleans(),
    )
    def open(
        self, key: str, tenant: str, size_bytes: int, owner: str, is_remote: bool, is_tensor: bool, seed: int, may_drop: bool = False
    ) -> None:
        if self.table.find(tenant, key.encode()) is None and self.table.puts.of_key(tenant, key.encode()) is None:
            if is_tensor:
                value = tensor_value(seed, TENSOR, dtype="float16")
                self.store.next_value(value)
                size_bytes = len(value)
            self.putting, self.is_making_room_of_own = tenant, self.table._ingest_tier.lacks_quota(size_bytes, tenant)
            before = self.table.quotas.use().get(tenant, NO_USE)
            self.may_drop = may_drop
            put = self.store.open(key, size_bytes, tenant=tenant, owner=owner, now_ns=self.now_ns, may_drop=may_drop)
            quota = self.table.quotas.now.of(tenant)
            if put is not None:
                use = self.table.quotas.use()[tenant]
                assert use.tiers[DRAM] <= (quota.dram_bytes if quota.dram_bytes is not None else use.tiers[DRAM])
                assert use.blocks <= (quota.blocks if quota.blocks is not None else use.blocks)
                may_have = quota.dram_slabs if quota.dram_slabs is not None else use.slabs[DRAM]
                assert use.slabs[DRAM] <= max(may_have, before.slabs[DRAM]), "it took a slab more than it may"
            if put is not None:
                self.puts.append(put)
                if is_remote:
                    put.grant = RemoteWriter(self.store.dram.view(put.slot))
                    self.remote.append(put.grant)
            self.hear()
            self.is_making_room_of_own = self.may_drop = False

    @precondition(lambda self: self.remote)
    @rule(pick=PICK, begins=st.booleans())
    def write_remotely(self, pick: int, begins: bool) -> None:
        writer = self.remote[pick % len(self.remote)]
        writer.begin() if begins else writer.end()

    def over(self, puts: list[OpenPut]) -> None:
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

    @rule(key=KEYS, tenant=TENANTS, size_bytes=SIZES, is_tensor=st.booleans(), seed=SEEDS)
    def put(self, key: str, tenant: str, size_bytes: int, is_tensor: bool, seed: int) -> None:
        """At once; and again if room was made."""
        for _ in range(2):
            opened = len(self.puts)
            self.open(key, tenant, size_bytes, "one", False, is_tensor, seed)
            if len(self.puts) > opened:
                self.commit(opened)
                return
            self.settle_moves()

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
        block = self.store.read(tenant, key.encode(), 0)
        assert block is self.visible.get((tenant, key))
        if block is not None:
            self.table.copies.acquire(block)
            slot = block.dram
            view = self.store.dram.view(slot) if slot is not None else None
            self.readers.append((block, view, bytes(view or b"")))
            if slot is not None:
                self.table.evictor.promote_to_hbm(block)
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
            self.table.copies.acquire(block)
            self.promotions.append((block, tier, slot, block.loss_of_copy(tier)))

    @precondition(lambda self: self.readers)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        block, view, was = self.readers.pop(pick % len(self.readers))
        assert view is None or bytes(view) == was, "the slot was reused under a reader"
        self.table.copies.release(block)

    @precondition(lambda self: any(block.dram is None for block in self.visible.values()))
    @rule(pick=PICK, loses_nvme=st.booleans())
    def read_up(self, pick: int, loses_nvme: bool) -> None:
        """A block below DRAM is read until it is in DRAM, if there is room; then, it may be, there only."""
        below = [place for place, block in self.visible.items() if block.dram is None]
        tenant, key = below[pick % len(below)]
        for _ in range(2):
            self.read(key, tenant)
            self.release(len(self.readers) - 1)
        block = self.visible[tenant, key]
        if self.promotions and self.promotions[-1][0] is block:
            self.end_promotion(len(self.promotions) - 1, True)
            if loses_nvme:
                self.table.copies.drop_copy(block, NVME)
                self.hear()

    @precondition(lambda self: self.promotions)
    @rule(pick=PICK, is_done=st.booleans())
    def end_promotion(self, pick: int, is_done: bool) -> None:
        block, tier, slot, loss = self.promotions.pop(pick % len(self.promotions))
        self.table.finish_move(block, tier, DRAM, slot, is_done=is_done, loss=loss)
        self.table.copies.release(block)
        self.hear()

    @precondition(lambda self: any(block.dram is None for block in self.visible.values()))
    @rule(pick=PICK)
    def stage(self, pick: int) -> None:
        """A block below DRAM is read there for one reader."""
        below = [block for block in self.visible.values() if block.dram is None]
        block = below[pick % len(below)]
        with patch.object(table_module, "STAGED_SHARE", 2):
            staged = stage(self.table, self.store.dram, block)
        self.hear()
        if staged is not None:
            tier = block.fastest()
            assert tier is not None
            data = self.store.bytes_of(block, tier)
            assert data is not None
            staged.memory[:] = data
            self.staged.append((staged.copy, staged.memory, data))

    @precondition(lambda self: self.staged)
    @rule(pick=PICK)
    def end_staged(self, pick: int) -> None:
        copy, _, _ = self.staged.pop(pick % len(self.staged))
        self.table.copies.release(copy)

    @invariant()
    def what_is_staged_stays_as_it_was(self) -> None:
        for _, memory, data in self.staged:
            assert bytes(memory) == data, "the slot was given to another"

    # --- what else happens ---

    @precondition(lambda self: self.visible)
    @rule(pick=PICK)
    def drop(self, pick: int) -> None:
        block = list(self.visible.values())[pick % len(self.visible)]
        del self.visible[block.tenant, block.key.decode()]
        self.table.copies.drop(block)
        self.hear()

    @precondition(lambda self: self.visible)
    @rule(pick=PICK)
    def lose_the_nvme_copy(self, pick: int) -> None:
        block = list(self.visible.values())[pick % len(self.visible)]
        if block.tier_mask() == 4:
            del self.visible[block.tenant, block.key.decode()]
        self.table.copies.drop_copy(block, NVME)
        self.hear()

    @precondition(lambda self: self.visible)
    @rule(pick=PICK, pinned=st.booleans())
    def pin(self, pick: int, pinned: bool) -> None:
        list(self.visible.values())[pick % len(self.visible)].pinned = pinned

    @rule(index=st.sampled_from([HBM, NVME]), is_suspended=st.booleans())
    def suspend(self, index: int, is_suspended: bool) -> None:
        if index in self.store.tiers:
            self.table.evictor.suspend(index, is_suspended=is_suspended)
            self.was_suspended |= index == NVME

    @precondition(lambda self: self.has_codec and not self.moves and not self.table.evictor._moves)
    @rule(name=st.sampled_from(CODECS))
    def change_codec(self, name: str) -> None:
        """As a restart may; what has been encoded must not change with it."""
        self.store.codec = make_codec(name)

    @rule()
    def demote_to_low_watermark(self) -> None:
        self.table.demote_to_low_watermark()
        self.hear()

    @rule(tenants=st.sets(TENANTS), walked=st.integers(0, 3))
    def retire(self, tenants: set[str], walked: int) -> None:
        """All blocks of these tenants, whose blocks are of one namespace."""
        self.table.retired.set({tenant: frozenset({"ns"}) for tenant in tenants})
        for _ in range(walked):
            self.table.retired.step()

    @rule(limits=st.dictionaries(TENANTS, QUOTAS), default=QUOTAS)
    def set_quotas(self, limits: dict[str, Quota], default: Quota) -> None:
        self.table.quotas.set(Quotas(default, limits))
        self.was_limited |= any(quota.limits() for quota in (default, *limits.values()))

    @rule()
    def take_moves(self) -> None:
        self.moves += [(move, self.store.begin(move)) for move in self.table.evictor.take_moves()]

    @precondition(lambda self: self.moves)
    @rule(pick=PICK, is_done=st.booleans())
    def end_move(self, pick: int, is_done: bool) -> None:
        move, job = self.moves.pop(pick % len(self.moves))
        if job is not None and move.source == DRAM:
            assert xxhash.xxh3_64_intdigest(job.data) == job.checksum, "the source was reused under its copy"
        elif move.block.is_dropped:
            is_done = False
        if job is not None and is_done:
            self.store.copy(job)
        self.store.end(move, job if is_done else None)
        self.hear()

    @rule()
    def settle_moves(self) -> None:
        """Planned moves are executed at once."""
        self.take_moves()
        while self.moves:
            self.end_move(0, True)

    @precondition(lambda self: self.visible)
    @rule(pick=PICK)
    def evict(self, pick: int) -> None:
        """A block leaves DRAM, as if its room were needed."""
        block = list(self.visible.values())[pick % len(self.visible)]
        self.store.shared_index.take_holds(block.tenant)
        if block.dram is not None and evictable_in(DRAM)(block):
            self.table.evictor.evict(block, self.table._ingest_tier)
            self.hear()

    @precondition(lambda self: self.has_codec and self.visible)
    @rule(pick=PICK, name=st.sampled_from(CODECS))
    def wear(self, pick: int, name: str) -> None:
        """Down, up, given up below, and down again, with another codec: the way on which a value could change twice."""
        place = list(self.visible)[pick % len(self.visible)]
        for codec in (None, name):
            if codec is not None and not self.moves and not self.table.evictor._moves:
                self.change_codec(codec)
            self.settle_moves()
            if place in self.visible:
                self.evict(list(self.visible).index(place))
                self.settle_moves()
            below = [one for one, block in self.visible.items() if block.dram is None]
            if place in below:
                self.read_up(below.index(place), codec is None)

    # --- what always holds ---

    def hear(self) -> None:
        """Follow the events as a master would; what was evicted leaves the model with them."""
        for kind, block, mask in self.store.events:
            if kind == EVENT_REMOVED:
                del self.heard[block]
                key = (block.tenant, block.key.decode())
                if self.visible.get(key) is block:
                    in_use = block.readers or block.pinned or block.moving or block.hold_bits
                    assert not in_use, "evicted though it may not leave"
                    has_room = self.nvme_is_large and not (self.was_suspended or self.was_limited)
                    assert not has_room or self.may_drop, "lost though NVMe has room"
                    assert not self.is_making_room_of_own or block.tenant == self.putting, "another tenant's block left"
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
            value = self.store.value_of(block)
            assert (block.size_bytes, block.checksum) == (len(value), xxhash.xxh3_64_intdigest(value)), "as it was put"
            for tier in self.store.tiers:
                found = self.store.bytes_of(block, tier)
                loss = block.loss_in(tier)
                is_tensor = block.generation in self.store.values
                assert loss is None or found in [after(codec, value) for codec in CODECS if is_tensor]
                assert loss is not None or found in (None, value)
                assert found is None or block.checksum_in(tier) == xxhash.xxh3_64_intdigest(found)

    @invariant()
    def the_master_would_know_exactly_what_is_there(self) -> None:
        assert self.heard == {block: block.tier_mask() for block in self.visible.values()}

    @invariant()
    def slots_add_up(self) -> None:
        check(self.table)
        dram = self.store.dram
        moves = [move for move, _ in self.moves] + self.table.evictor._moves
        held = {block for block, _, _ in self.readers} | {move.block for move in moves} | {block for block, *_ in self.promotions}
        waiting = sum(block.dram is not None for block in held if block.is_dropped)
        kept = len(self.store.shared_index._kept)
        assert (dram.quarantined_bytes > 0) == bool(waiting + len(self.expired) + len(self.lingering) + kept + len(self.staged))
        assert kept <= len(self.looks)
        assert self.table.open_puts == len(self.puts)
        assert self.table.evictor.under_way == len(moves) + len(self.promotions)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.all_is_free_in_the_end()
            self.store.close()
        self.folder.cleanup()

    def all_is_free_in_the_end(self) -> None:
        self.take_moves()
        for move, _ in self.moves:
            self.table.finish_move(move.block, move.source, move.target, move.slot, is_done=False)
        for block, tier, slot, _ in self.promotions:
            self.table.finish_move(block, tier, DRAM, slot, is_done=False)
            self.table.copies.release(block)
        for block, _, _ in self.readers + self.staged:
            self.table.copies.release(block)
        for owner in ("one", "two"):
            self.forget_owner(owner)
        for tenant, _, _, hazard in self.looks:
            self.clients[tenant].desk.release_hazard(hazard)
        self.store.shared_index.release_unprotected()
        for writer in self.lingering:
            writer.under_way = 0
        self.table.expire(now_ns=self.now_ns)
        for block in list(self.table.blocks()):
            self.table.copies.drop(block)
        for one in self.store.tiers.values():
            assert one.used_bytes == one.quarantined_bytes == 0


TableMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, suppress_health_check=list(HealthCheck))
TestTable = TableMachine.TestCase
