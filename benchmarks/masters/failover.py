"""Pause of clients when the owner of three masters on three etcd members is killed, is stopped, or shuts down.

The clients are gets by a client of another host, and puts with ack="cluster". A pause is the longest time between two replies of gets, each
of which must find all its keys, or of puts. The clients, two
nodes, the masters and etcd share one machine, so that what each of them computes counts.
"""

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvstore.cli.tools.bench import BenchRow, at_most
from kvstore.cli.tools.child import Child
from kvstore.client.sync import Client
from kvstore.protocol.errors import KVStoreError
from tests.etcd_cluster import EtcdCluster
from tests.system.running import System

BLOCKS: Final = 200_000
BLOCK_BYTES: Final = 512
LARGE_BLOCKS: Final = 10_000_000
LARGE_BLOCK_BYTES: Final = 64
LARGE_QUOTA_BYTES: Final = 8 << 30
BATCH: Final = 2_000
ASKED: Final = 16
"""Blocks of one get."""
LEASE_TTL_S: Final = 2
CALM_S: Final = 2.0
WATCHED_S: Final = 10.0
PAUSE_S: Final = 3.0
DEADLINE_S: Final = 60.0
FLAGS: Final = ("--lease-ttl-s", str(LEASE_TTL_S), "--node-ttl-s", "10")
WAYS: Final[dict[str, Callable[[int], None]]] = {
    "killed": lambda pid: os.kill(pid, signal.SIGKILL),
    "stopped (SIGSTOP)": lambda pid: os.kill(pid, signal.SIGSTOP),
    "ended (SIGTERM)": lambda pid: os.kill(pid, signal.SIGTERM),
}


def rows() -> Iterator[BenchRow]:
    for way in WAYS:
        with cluster() as system:
            yield from pauses(system, BLOCKS, BLOCK_BYTES, (way,), "--dram", "512MiB")


def large_rows() -> Iterator[BenchRow]:
    """Of as many blocks as fit, small ones, put once for both ways: minutes, and 15 GB of memory."""
    ways = ("stopped (SIGSTOP)", "killed")
    with cluster(f"--quota-backend-bytes={LARGE_QUOTA_BYTES}") as system:
        yield from pauses(system, LARGE_BLOCKS, LARGE_BLOCK_BYTES, ways, "--dram", "1GiB", "--table-share", "7")


@contextmanager
def cluster(*etcd_flags: str) -> Iterator[System]:
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        etcd = EtcdCluster(Path(folder), *etcd_flags)
        etcd.start()
        try:
            with System(Path(folder) / "system", etcd.url, masters=3) as system:
                yield system
        finally:
            etcd.remove()


def pauses(system: System, blocks: int, block_bytes: int, ways: Sequence[str], *node_flags: str) -> Iterator[BenchRow]:
    for index in range(3):
        system.start_master(index, *FLAGS)
    for name in ("n0", "n1"):
        system.start_node(name, *node_flags)
    keys = [b"block-%08d" % number for number in range(blocks)]
    value = bytes(block_bytes)
    with system.remote_client(deadline_s=DEADLINE_S) as reader, system.client(deadline_s=DEADLINE_S) as writer:
        for begin in range(0, blocks, BATCH):
            assert all(writer.put_batch(keys[begin : begin + BATCH], [value] * BATCH))
        for way in ways:
            watched = [Watched(lambda: gets(reader, keys)), Watched(lambda: puts(writer, value))]
            time.sleep(CALM_S)
            WAYS[way](owner(system).pid)
            time.sleep(WATCHED_S)
            for what, one in zip(("gets", "puts"), watched, strict=True):
                longest_s = one.end()
                yield at_most(f"owner {way}, {blocks:,} blocks, lease {LEASE_TTL_S} s: longest pause of {what}", longest_s, "s", PAUSE_S)
            deadline_s = time.monotonic() + DEADLINE_S
            while lost := missing(writer, keys):
                assert time.monotonic() < deadline_s, f"{lost} blocks are lost"


def owner(system: System) -> Child:
    """The master that owns the catalog."""
    return system.masters[system.address.split(",").index(system.status().owner.address)]


def missing(client: Client, keys: list[bytes]) -> int:
    return sum(client.exists_batch(keys[begin : begin + BATCH]).count(False) for begin in range(0, len(keys), BATCH))


def gets(client: Client, keys: list[bytes]) -> bool:
    return None not in client.get_batch(random.sample(keys, ASKED))


def puts(client: Client, value: bytes) -> bool:
    return client.put(random.randbytes(16), value)


class Watched(threading.Thread):
    """Asks again and again; `end` gives the longest time in which there was no good answer."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self._over = threading.Event()
        self._longest_s = 0.0
        self.start()

    def run(self) -> None:
        last_s = time.monotonic()
        while not self._over.is_set():
            try:
                is_good = self._ask()
            except KVStoreError:
                is_good = False
            if is_good:
                now_s = time.monotonic()
                self._longest_s, last_s = max(self._longest_s, now_s - last_s), now_s
        self._longest_s = max(self._longest_s, time.monotonic() - last_s)

    def end(self) -> float:
        self._over.set()
        self.join(DEADLINE_S)
        return self._longest_s
