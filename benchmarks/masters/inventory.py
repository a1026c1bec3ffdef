"""What a link costs that breaks and is made anew: the node's whole inventory, once more. A directory in a process of its own is told what a
node tells it; bytes of the messages, and the processor's time of the master that takes them in: unpacked, planned, applied.
"""

import multiprocessing
import random
import time
from collections.abc import Iterator
from typing import Final

from benchmarks.masters.memory import KEY_BYTES, cut
from kvstore.client.tools.bench_report import Row
from kvstore.master.directory.directory import Directory
from kvstore.master.directory.membership import NodeInfo
from kvstore.protocol.catalog_messages import EVENT_COMMIT, PHASE_SYNC, PHASE_SYNC_BEGIN, PHASE_SYNC_END, Publish
from kvstore.protocol.frames import VERSION

BLOCKS: Final = 1_000_000
MESSAGE: Final = 4096
"""Blocks of one message, as a node sends them."""
PROMPT: Final = 16
TIERS: Final = 2


def rows() -> Iterator[Row]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield from pool.apply(measured)


def measured() -> list[Row]:
    directory = Directory(1, wall_ns=0, rng=random.Random())
    keys = random.Random(1).randbytes(KEY_BYTES * BLOCKS)
    found = []
    for name in ("first inventory", "the same once more, after a break of the link"):
        node, _ops = directory.register(NodeInfo("one", 1), [], 0)
        sent_bytes, spent_s = 0, 0.0
        for body in inventory(node.epoch, keys):
            sent_bytes += len(body)
            begun_s = time.process_time()
            plan = directory.plan_publish(node.node_id, Publish.unpack_of(VERSION, memoryview(body)))
            directory.apply(plan)
            spent_s += time.process_time() - begun_s
        assert directory.blocks_at(node.node_id) == BLOCKS
        found += [
            Row(f"{BLOCKS:,} blocks, {name}: sent", sent_bytes / 1e6, "MB"),
            Row(f"{BLOCKS:,} blocks, {name}: the master's processor", spent_s, "s"),
        ]
        directory.disconnected(node.node_id, node.epoch, 0)
    return found


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
