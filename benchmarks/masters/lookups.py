"""Rate of lookups at the owner, in keys per second, by processes that send batches over its Unix socket as clients do.

Keys are drawn from all blocks, so they are in no cache. Requesters and master share the machine. With a requester on each remaining
processor, the requesters saturate first.
"""

import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from typing import Final

from benchmarks.masters.memory import KEY_BYTES, cut
from kvstore.cli.tools.bench import BenchRow, at_least
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client
from kvstore.protocol.master_messages import Locations, Lookup
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline

BLOCKS: Final = 500_000
PUT: Final = 4096
ASKERS: Final = 2
BATCHES: Final = (1, 64, 1024)
ASKED_S: Final = 3.0
DEADLINE_S: Final = 60.0
AIM_MKEYS: Final = 3


def rows() -> Iterator[BenchRow]:
    data = random.Random(1).randbytes(KEY_BYTES * BLOCKS)
    plan = ClusterPlan(dram="2GiB", is_private=True)
    with LocalCluster(plan, on_log=lambda name, line: print(name, line, file=sys.stderr)) as running, Client(running.address) as client:
        running.wait_warm()
        for begin in range(0, BLOCKS, PUT):
            keys = cut(data, range(begin, min(begin + PUT, BLOCKS)))
            client.put_batch(keys, [b"v"] * len(keys), ack="cluster", deadline_s=DEADLINE_S)
        with multiprocessing.get_context("spawn").Pool(ASKERS) as pool:
            for askers in range(1, ASKERS + 1):
                for batch in BATCHES:
                    asked = pool.starmap(ask, [(running.address, data, batch, seed) for seed in range(askers)], chunksize=1)
                    name = f"look-ups of {batch:,} keys, {askers} asking, {BLOCKS:,} blocks"
                    found = sum(asked) / 1e6
                    yield at_least(name, found, "M keys/s", AIM_MKEYS) if batch == max(BATCHES) else BenchRow(name, found, "M keys/s")


def ask(master: str, data: bytes, batch: int, seed: int) -> float:
    """Keys a second."""
    numbers = random.Random(seed)
    questions = [Lookup(cut(data, numbers.sample(range(BLOCKS), batch))) for _ in range(64)]
    channel = Channel.open(parse_address(master), Hello(ROLE_CLIENT), Deadline(DEADLINE_S))
    if channel.welcome.unix:
        near = Channel.open(parse_address(f"unix:{channel.welcome.unix}"), Hello(ROLE_CLIENT), Deadline(DEADLINE_S))
        channel.close()
        channel = near
    found = count = 0
    begin_s = time.perf_counter()
    while (spent_s := time.perf_counter() - begin_s) < ASKED_S:
        answer = channel.call(questions[count % len(questions)], Locations, Deadline(DEADLINE_S))
        found += len(answer.replicas) - answer.replicas.count(0)
        count += 1
    channel.close()
    assert found == count * batch, f"{count * batch - found} blocks are not found"
    return found / spent_s
