"""Shared parts of the store's tests: a block table over real tiers, values that identify their block, and a mover
without threads."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.client.local.reader_slots import Hazard, LocalReaderSlots
from kvstore.client.local.shared_index import SharedIndexReader
from kvstore.store.block_table.block import DRAM, HBM, NVME, Block
from kvstore.store.block_table.event_log import BlockEventLog
from kvstore.store.block_table.evictor import TierMove
from kvstore.store.block_table.holds import SHARE, Holds
from kvstore.store.block_table.open_puts import OpenPut
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.block_table.quotas import REMEMBERED_SHARE, TABLE_BYTES
from kvstore.store.block_table.table import BlockTable, TableRules
from kvstore.store.shared_index.index_writer import SharedIndexWriter
from kvstore.store.tiering.mover import MoveJob, fetch
from kvstore.tiers.dram import DramTier
from kvstore.tiers.policies.by_name import make_family
from kvstore.tiers.tier import Tier
from kvstore.tiers.value_codec import Encoding, make_codec
from tests.store.failing_tier import FailingHbm, FailingNvme
from tests.store.integrity import check

PUT_TTL_NS = 1000
MAX_HAZARD_NS = 5000
MAX_HOLD_NS = 10**12


def bytes_for(max_blocks: int) -> int:
    """The table's memory with which so many blocks may be known."""
    return int(max_blocks * TABLE_BYTES / (1 - REMEMBERED_SHARE)) + 1


def value_of(block: Block) -> bytes:
    """The bytes that belong to the block and to no other: its tenant, key and generation, over and over."""
    unit = f"{block.tenant}/{block.key.hex()}/{block.generation}|".encode()
    return (unit * (block.size_bytes // len(unit) + 1))[: block.size_bytes]


class RemoteWriter:
    """A Grant of a writer on another host, of which `under_way` transfers have begun and not ended: only those may still write."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.under_way = 0
        self.is_revoked = False

    def begin(self) -> None:
        self.under_way += not self.is_revoked

    def end(self) -> None:
        self.under_way = max(0, self.under_way - 1)

    def scribble(self) -> None:
        """Bytes arrive, if they still can."""
        if self.under_way:
            self.memory[:] = b"\xff" * len(self.memory)

    def revoke(self) -> bool:
        self.is_revoked = True
        return not self.under_way


class Found(NamedTuple):
    """A Place with names."""

    at: int
    sequence: int
    slab: int
    offset: int
    size: int
    checksum: int
    slot: int


def find(index: SharedIndexReader, key: bytes) -> Found | None:
    place = index.find(key)
    return None if place is None else Found(*place)


def still(index: SharedIndexReader, found: Found) -> bool:
    """Return True if the entry has not changed since it was found."""
    return index.words[found.at] == found.sequence


class LocalClient:
    """A local client of one tenant."""

    def __init__(self, index: SharedIndexReader, desk: LocalReaderSlots, dram: DramTier, tenant: str) -> None:
        self.index = index
        self.desk = desk
        self._dram = dram
        self._tenant = tenant

    def find(self, name: str) -> Found | None:
        return find(self.index, name.encode())

    def memory(self, found: Found) -> memoryview:
        """The very bytes, through the mapping."""
        return self._dram.slab_memory(found.slab, tenant=self._tenant)[found.offset : found.offset + found.size]

    def read(self, name: str) -> bytes | None:
        """As LocalReads does; None if it is not here."""
        found = self.find(name)
        if found is None:
            return None
        value = bytes(self.memory(found))
        assert still(self.index, found)
        self.count(found)
        return value

    def count(self, found: Found) -> None:
        """Say that it was read."""
        self.desk.read_one(self.index, found.at, found.sequence, found.size)

    def hold(self, names: Iterable[str], number: int, until_ns: int) -> list[str]:
        """Have those that are here stay; which these are."""
        found = {name: place for name in names if (place := self.index.find(name.encode())) is not None}
        index = self.index
        words = [(place[0] - index.entries) // index.entry_words | (place[1] & 0xFFFF_FFFF) << 32 for place in found.values()]
        assert self.desk.hold(number, until_ns, np.array(words, np.uint64))
        return list(found)

    def look(self, name: str) -> tuple[memoryview, Hazard] | None:
        """A view, and its hazard."""
        found = self.find(name)
        if found is None:
            return None
        hazard = self.desk.acquire_hazard(self.index, found)
        assert hazard is not None
        return self.memory(found), hazard


class Store:
    """A table, its tiers and the events that it emitted. `dram_bytes` and the others are capacities; 0: no such tier."""

    def __init__(
        self,
        dram_bytes: int,
        *,
        hbm_bytes: int = 0,
        nvme_bytes: int = 0,
        folder: Path | None = None,
        slab_bytes: int | None = None,
        policy: str = "lru",
        high: float = 1.0,
        low: float = 1.0,
        write_worth: float = 0.0,
        codec: str = "none",
        max_blocks: int | None = None,
        may_hold_all: bool = False,
    ) -> None:
        """`may_hold_all`: not only a tenth of each tier may be held."""
        self.dram = DramTier(dram_bytes, slab_bytes=slab_bytes)
        self.tiers: dict[int, Tier] = {DRAM: self.dram}
        if hbm_bytes:
            self.tiers[HBM] = FailingHbm(hbm_bytes, "cpu", slab_bytes=slab_bytes)
        if nvme_bytes:
            assert folder is not None
            self.tiers[NVME] = FailingNvme(folder, capacity_bytes=nvme_bytes, sync=False)
        self.events: list[tuple[int, Block, int]] = []
        self.emit: Callable[[int, Block], None] = lambda kind, block: self.events.append((kind, block, block.tier_mask()))
        """Receiver of the table's events; a test may replace it."""
        self.codec = make_codec(codec)
        self.values: dict[int, bytes] = {}
        """Of the blocks that do not have `value_of`, by generation: tensor values, say."""
        self.namespace = "ns"
        """Of blocks that are made from now on."""
        self.now_us = 0
        """The wall clock of recorded events."""
        times = SHARE if may_hold_all else 1
        self.holds = Holds({index: times * tier.capacity_bytes for index, tier in self.tiers.items()}, max_ns=MAX_HOLD_NS)
        self.shared_index = SharedIndexWriter(
            self.dram, self.holds, max_hazard_ns=MAX_HAZARD_NS, disconnect=lambda owner: self.shared_index.forget_owner(owner)
        )
        self.partition_map = PartitionMap()
        self.table = BlockTable(
            self.tiers,
            TableRules(
                make_family=lambda: make_family(policy),
                put_ttl_ns=PUT_TTL_NS,
                high_watermark=high,
                low_watermark=low,
                write_worth=write_worth,
                max_table_bytes=bytes_for(max_blocks) if max_blocks is not None else None,
                encoding_of=self._encoding if self.codec is not None else None,
            ),
            emit=lambda kind, block: self.emit(kind, block),
            events=BlockEventLog(lambda: self.now_us),
            shared_index=self.shared_index,
            partition_map=self.partition_map,
            holds=self.holds,
        )
        self._generation = 0

    def client(self, tenant: str = "red", owner: object = "client") -> LocalClient:
        """A client of this host that has attached to the tenant's index."""
        sizes, fds = self.shared_index.attach(owner, tenant, lambda: self.table.blocks_of(tenant))
        try:
            return LocalClient(SharedIndexReader(fds[0], sizes.sizes[0]), LocalReaderSlots(fds[1], sizes.sizes[1]), self.dram, tenant)
        finally:
            for fd in fds:
                os.close(fd)

    def _encoding(self, block: Block) -> Encoding | None:
        slot = block.dram
        assert slot is not None
        assert self.codec is not None
        return self.codec.encoding(self.dram.view(slot))

    def value_of(self, block: Block) -> bytes:
        return self.values.get(block.generation) or value_of(block)

    def put_tensor(self, name: str, value: bytes) -> Block:
        """Put that value, which is known to fit now."""
        self.next_value(value)
        return self.put(name, len(value))

    def next_value(self, value: bytes) -> None:
        """The next block that is made has this value."""
        self.values[self._generation + 1] = value

    def block(self, name: str, size_bytes: int = 100, *, tenant: str = "red", parent: str = "") -> Block:
        """A new block that is nowhere yet, of a generation of its own."""
        self._generation += 1
        return self.table.rows.make(tenant, name.encode(), size_bytes, self._generation, self.namespace, parent.encode())

    def open(
        self,
        name: str,
        size_bytes: int = 100,
        *,
        tenant: str = "red",
        owner: object = "writer",
        now_ns: int = 0,
        may_drop: bool = False,
    ) -> OpenPut | None:
        return self.table.open(self.block(name, size_bytes, tenant=tenant), owner, now_ns=now_ns, may_drop=may_drop)

    def open_remote(self, name: str, size_bytes: int = 100, *, owner: object = "writer", now_ns: int = 0) -> tuple[OpenPut, RemoteWriter]:
        """A put that is known to fit now, with its writer on another host."""
        put = self.open(name, size_bytes, owner=owner, now_ns=now_ns)
        assert put is not None, f"no room for {name}"
        put.grant = writer = RemoteWriter(self.dram.view(put.slot))
        return put, writer

    def write(self, put: OpenPut) -> None:
        self.dram.view(put.slot)[:] = self.value_of(put.block)

    def commit(self, put: OpenPut) -> Block:
        self.write(put)
        return self.table.commit(put, xxhash.xxh3_64_intdigest(self.value_of(put.block)))

    def put(self, name: str, size_bytes: int = 100, *, tenant: str = "red") -> Block:
        """Put a block that is known to fit now."""
        put = self.open(name, size_bytes, tenant=tenant)
        assert put is not None, f"no room for {name}"
        return self.commit(put)

    def try_put(self, name: str, size_bytes: int = 100, *, tenant: str = "red") -> Block | None:
        put = self.open(name, size_bytes, tenant=tenant)
        return self.commit(put) if put is not None else None

    def begin(self, move: TierMove) -> MoveJob | None:
        """Begin a move as the mover does in the loop. None: the source was dropped."""
        source = move.block.slots[move.source]
        return MoveJob(move, source, self.tiers[move.source]) if source is not None and not move.block.is_dropped else None

    def copy(self, job: MoveJob) -> None:
        """Execute a move as the mover does in its thread."""
        fetch(self.tiers[job.move.source], [job])
        assert job.damage is None
        if job.move.encoding is not None:
            assert self.codec is not None
            job.encode(self.codec)
        if job.is_good:
            self.tiers[job.move.target].write_batch([job.record()])

    def finish(self, move: TierMove, *, is_done: bool = True) -> None:
        job = self.begin(move) if is_done else None
        if job is not None:
            self.copy(job)
        self.end(move, job)

    def end(self, move: TierMove, job: MoveJob | None) -> None:
        """Tell the table what became of the copy, as the mover would; None: nothing."""
        move.block.stays_raw |= job is not None and job.is_refused
        is_done, loss = (job.is_good, job.loss) if job is not None else (False, None)
        self.table.finish_move(move.block, move.source, move.target, move.slot, is_done=is_done, loss=loss)

    def settle(self) -> None:
        """Make every planned copy, as the mover would, until no more are planned."""
        while moves := self.table.evictor.take_moves():
            for move in moves:
                self.finish(move)
        check(self.table)

    def bytes_of(self, block: Block, tier: int) -> bytes | None:
        """The copy's bytes, None where there is none."""
        slot = block.slots[tier]
        if slot is None:
            return None
        data = bytearray(block.size_bytes)
        assert self.tiers[tier].read_batch_into([slot], [memoryview(data)]) == [None]
        return bytes(data)

    def read(self, tenant: str, key: bytes, generation: int) -> Block | None:
        """Read a block, of any generation for 0; counts as an access."""
        block = self.table.find(tenant, key)
        if block is None or generation not in (0, block.generation):
            return None
        self.table.hit(block)
        return block

    def names(self, blocks: Iterable[Block] | None = None) -> str:
        """The visible keys as one text, sorted."""
        return "".join(sorted(block.key.decode() for block in (self.table.blocks() if blocks is None else blocks)))

    def close(self) -> None:
        self.shared_index.close()
        for tier in self.tiers.values():
            tier.close()
