"""Rate of lookups of two owners against one, with equally many requesters, the same blocks and one etcd.

Each requester sends batches to the owner of its keys' partition. Two requesters and two owners need four processors; with fewer, the
processors limit the ratio.
"""

import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.masters.memory import KEY_BYTES, cut
from kvstore.cli.tools.bench import BenchRow, at_least
from kvstore.protocol.errors import NoOwner
from kvstore.protocol.master_messages import Locations, Lookup
from kvstore.protocol.partitions import partition_of
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from tests.etcd_server import EtcdServer
from tests.system.running import System, until

BLOCKS: Final = 200_000
PUT: Final = 4096
BATCH: Final = 1024
ASKERS: Final = 2
ASKED_S: Final = 3.0
DEADLINE_S: Final = 60.0
AIM: Final = 1.6


def rows() -> Iterator[BenchRow]:
    data = random.Random(1).randbytes(KEY_BYTES * BLOCKS)
    one, two = (keys_a_second(data, owners) for owners in (1, 2))
    name = f"look-ups of {BATCH:,} keys, {ASKERS} asking, {BLOCKS:,} blocks in etcd, {os.cpu_count()} processors"
    yield BenchRow(f"{name}: one owner", one / 1e6, "M keys/s")
    yield BenchRow(f"{name}: two owners", two / 1e6, "M keys/s")
    yield at_least(f"{name}: two owner processes / one", two / one, "", AIM)


def keys_a_second(data: bytes, owners: int) -> float:
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        Path(folder, "etcd").mkdir()
        etcd = EtcdServer(Path(folder, "etcd"))
        etcd.start()
        try:
            with System(Path(folder), f"etcd://{etcd.host_port}", masters=owners) as system:
                for index in range(owners):
                    system.start_master(index, "--partitions", str(owners))
                system.start_node("n0", "--dram", "1GiB")
                until(lambda: len(set(places(system, owners))) == owners, "each master owns its share")
                with system.client(deadline_s=DEADLINE_S) as client:
                    for begin in range(0, BLOCKS, PUT):
                        keys = cut(data, range(begin, min(begin + PUT, BLOCKS)))
                        client.put_batch(keys, [b"v"] * len(keys))
                found = places(system, owners)
                with multiprocessing.get_context("spawn").Pool(ASKERS) as pool:
                    asked = [(found[asker % owners], data, asker % owners, owners, asker) for asker in range(ASKERS)]
                    return sum(pool.starmap(ask, asked, chunksize=1))
        finally:
            etcd.stop()


def places(system: System, partitions: int) -> list[str]:
    """Return the address of each partition's owner, or an empty list while a partition has no owner."""
    found = []
    for partition in range(partitions):
        address = parse_address(system.address.split(",", maxsplit=1)[0])._replace(partition=partition)
        try:
            channel = Channel.open(address, Hello(ROLE_CLIENT), Deadline(DEADLINE_S))
        except NoOwner:  # it is changing hands
            return []
        found.append(channel.welcome.owner or str(address))
        channel.close()
    return found


def ask(master: str, data: bytes, partition: int, partitions: int, seed: int) -> float:
    """Keys a second, of one partition."""
    numbers = random.Random(seed)
    mine = [number for number in range(BLOCKS) if partition_of(cut(data, [number])[0], partitions) == partition]
    questions = [Lookup(cut(data, numbers.sample(mine, BATCH))) for _ in range(64)]
    channel = Channel.open(parse_address(master)._replace(partition=partition), Hello(ROLE_CLIENT), Deadline(DEADLINE_S))
    near = Channel.open(
        parse_address(f"unix:{channel.welcome.unix}")._replace(partition=partition), Hello(ROLE_CLIENT), Deadline(DEADLINE_S)
    )
    channel.close()
    found = count = 0
    begin_s = time.perf_counter()
    while (spent_s := time.perf_counter() - begin_s) < ASKED_S:
        answer = near.call(questions[count % len(questions)], Locations, Deadline(DEADLINE_S))
        found += len(answer.replicas) - answer.replicas.count(0)
        count += 1
    near.close()
    assert found == count * BATCH, f"{count * BATCH - found} blocks are not found"
    return found / spent_s
