"""Cost of a reconnect between node and master: a full resync of the inventory, or an incremental one by digests.

A directory in its own process receives a node's messages. Rows are the bytes of the messages, and the master's processor time to unpack,
plan and apply them. For digests, rows also have the node's time and the longest slice of either event loop.
"""

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks.masters.memory import KEY_BYTES, cut
from kvstore.cli.tools.bench import BenchRow, at_most
from kvstore.master.directory.bounds import DirectoryLimits
from kvstore.master.directory.directory import Directory
from kvstore.master.directory.followed_records import FollowedRecords
from kvstore.master.directory.membership.members import NodeInfo
from kvstore.protocol.catalog_messages import EVENT_COMMIT, PHASE_SYNC, PHASE_SYNC_BEGIN, PHASE_SYNC_END, Digests, Publish
from kvstore.protocol.digests import MAX_RUN
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.session_messages import Flags
from kvstore.store.block_table.block import DRAM, Block
from kvstore.store.block_table.rows import BlockRows, decided
from kvstore.store.replication.event_replicator import PART_BLOCKS
from kvstore.store.replication.inventory_comparison import InventoryComparison as NodeSide
from kvstore.tiers.tier import Slot

BLOCKS: Final = 1_000_000
MESSAGE: Final = 4096
"""Blocks of one message, as a node sends them."""
PROMPT: Final = 16
TIERS: Final = 2
CHANGED: Final = 100
TURN_MS: Final = 50.0
_SLOT: Final = Slot(0, 0, 1 << 16)


def rows() -> Iterator[BenchRow]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield from pool.apply(measured)


def measured() -> list[BenchRow]:
    directory = Directory(1, FollowedRecords(), DirectoryLimits(), wall_ns=0, now_ns=0, rng=random.Random())
    keys = random.Random(1).randbytes(KEY_BYTES * BLOCKS)
    found = []
    for name in ("first inventory", "the same once more, after a break of the link"):
        node, _ops = directory.register(NodeInfo("one", 1), [], 0)
        sent_bytes, spent_s = 0, 0.0
        for body in inventory(node.epoch, keys):
            sent_bytes += len(body)
            begun_s = time.process_time()
            plan = directory.plan_publish(node.node_id, Publish.unpack(memoryview(body)))
            directory.apply(plan)
            spent_s += time.process_time() - begun_s
        assert directory.blocks_at(node.node_id) == BLOCKS
        found += [
            BenchRow(f"{BLOCKS:,} blocks, {name}: sent", sent_bytes / 1e6, "MB"),
            BenchRow(f"{BLOCKS:,} blocks, {name}: the master's processor", spent_s, "s"),
        ]
        directory.disconnected(node.node_id, node.epoch, 0)
    return found + compared(directory, keys)


class _Turns:
    """A loop that runs what it is given; the processor's time of its turns."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []
        self.spent_s: list[float] = []

    def run(self) -> None:
        while self.soon:
            begun_s = time.process_time()
            self.soon.pop(0)()
            self.spent_s.append(time.process_time() - begun_s)


def compared(directory: Directory, keys: bytes) -> list[BenchRow]:
    """After a break in which CHANGED blocks were replaced by others."""
    node, _ops = directory.register(NodeInfo("one", 1), [], 0)
    rows = BlockRows()
    blocks = [rows.make("bench", cut(keys, [number])[0], 1 << 16, number + 1, checksum=number) for number in range(BLOCKS)]
    for block in blocks:
        block.set_slot(DRAM, _SLOT)
    for block in random.Random(3).sample(blocks, CHANGED):
        block.key, block.generation = b"new" + block.key[3:], block.generation + BLOCKS
    directory.plan_publish(node.node_id, Publish.unpack(memoryview(_named(node.epoch, PHASE_SYNC_BEGIN, []))))
    node_side, bodies, told, differing = _Turns(), list[bytes](), list[Callable[[Flags | KVStoreError], None]](), list[Block]()

    def send(message: Digests, answered: Callable[[Flags | KVStoreError], None]) -> None:
        bodies.append(message.pack())
        told.append(answered)

    def then(named: list[Block] | KVStoreError | None) -> None:
        assert isinstance(named, list)
        differing.extend(named)

    parts = (decided(blocks[begin : begin + PART_BLOCKS]) for begin in range(0, BLOCKS, PART_BLOCKS))
    NodeSide(parts, epoch=node.epoch, send=send, soon=node_side.soon.append, then=then, max_blocks=2 * node.known_blocks)
    node_side.run()
    comparison, master_s = directory.compare(node.node_id, node.epoch), list[float]()
    begun_s = time.process_time()
    for body in bodies:
        comparison.take(Digests.unpack(memoryview(body)))
    master_s.append(time.process_time() - begun_s)
    steps, is_left = comparison.steps(), True
    while is_left:
        begun_s = time.process_time()
        is_left = next(steps, None) is not None
        master_s.append(time.process_time() - begun_s)
    for answered, flags in zip(told, comparison.flags(), strict=True):
        answered(Flags(flags))
    assert CHANGED <= len(differing) <= (MAX_RUN + 2) * CHANGED
    bodies += [_named(node.epoch, PHASE_SYNC, differing), _named(node.epoch, PHASE_SYNC_END, [])]
    for body in bodies[-2:]:
        begun_s = time.process_time()
        directory.apply(directory.plan_publish(node.node_id, Publish.unpack(memoryview(body))))
        master_s.append(time.process_time() - begun_s)
    assert directory.blocks_at(node.node_id) == BLOCKS
    name = f"{BLOCKS:,} blocks, of which {CHANGED} have changed meanwhile, by digests"
    return [
        BenchRow(f"{name}: sent", sum(map(len, bodies)) / 1e6, "MB"),
        BenchRow(f"{name}: the master's processor", sum(master_s), "s"),
        at_most(f"{name}: the master's longest turn", max(master_s) * 1e3, "ms", TURN_MS),
        BenchRow(f"{name}: the node's processor", sum(node_side.spent_s), "s"),
        at_most(f"{name}: the node's longest turn", max(node_side.spent_s) * 1e3, "ms", TURN_MS),
    ]


def _named(epoch: int, phase: int, blocks: list[Block]) -> bytes:
    count = len(blocks)
    columns = (
        [block.size_bytes for block in blocks],
        [block.checksum for block in blocks],
        [block.generation for block in blocks],
        bytes([TIERS]) * count,
        [b""] * count,
    )
    keys = [block.key for block in blocks]
    return Publish(epoch, phase, ["bench"], ["ns"], keys, bytes([EVENT_COMMIT]) * count, [0] * count, [0] * count, *columns).pack()


def inventory(epoch: int, all_keys: bytes) -> Iterator[bytes]:
    for begin in range(0, BLOCKS, MESSAGE):
        numbers = range(begin, min(begin + MESSAGE, BLOCKS))
        keys, count = cut(all_keys, numbers), len(numbers)
        parents = [b"" if number % PROMPT == 0 else all_keys[KEY_BYTES * (number - 1) : KEY_BYTES * number] for number in numbers]
        generations, phase = [number + 1 for number in numbers], PHASE_SYNC
        if not begin:
            phase = PHASE_SYNC_BEGIN
        elif numbers[-1] == BLOCKS - 1:
            phase = PHASE_SYNC_END
        columns = [1 << 16] * count, list(numbers), generations, bytes([TIERS]) * count, parents
        message = Publish(epoch, phase, ["bench"], ["ns"], keys, bytes([EVENT_COMMIT]) * count, [0] * count, [0] * count, *columns)
        yield bytes(message.pack())
