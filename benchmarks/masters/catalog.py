"""The catalog in a real etcd of one member: how fast blocks are published, what one takes, how long a restart is, whether churn fills it.

etcd's data is in memory (/dev/shm) where there is such a folder, so that the machine's disk is not what is measured; the size of a block is
that of etcd's database after its history was compacted and it was defragmented, less what an empty one has.
"""

import random
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc
from aetcd.rpc import rpc_pb2, rpc_pb2_grpc

from benchmarks.store import publish_rows
from kvstore.cli.tools.bench import BenchRow, at_least, at_most
from kvstore.master.catalogs.etcd.catalog import EtcdCatalog, EtcdTiming
from kvstore.master.catalogs.etcd.maintenance import MaintenanceLimits
from kvstore.master.catalogs.interface import BlockDeletes, BlockPuts, Change
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import KVStoreError
from tests.etcd_server import EtcdServer
from tests.master.catalogs.conformance import elected
from tests.master.running import MasterProcess

BLOCKS: Final = 1_000_000
COMMIT: Final = 1024
"""Blocks of one commit, as of a large message of a node."""
WAITING: Final = 64
"""Commits that wait at once."""
PROMPT: Final = 16
"""Blocks of one prompt: all but the first have a parent, which is most often in another shard."""
QUOTA_BYTES: Final = 64 << 20
QUOTAS: Final = 5
"""As many times the quota are written while blocks come and go."""
LIVE_COMMITS: Final = 64
"""Of the churn: what is older is deleted."""
PATIENCE_S: Final = 600.0


def rows() -> Iterator[BenchRow]:
    with server() as etcd:
        empty_bytes = settled_bytes(etcd)
        prefix = f"/{uuid.uuid4()}"
        catalog = EtcdCatalog([etcd.host_port], prefix=prefix, timing=EtcdTiming(10.0))
        elected(catalog)
        commits = list(prompts(BLOCKS))
        yield at_least(f"publishing {BLOCKS:,} blocks by the catalog alone", BLOCKS / commit(catalog, commits), "blocks/s", 100_000)
        await_merged(etcd)
        catalog.close()
        yield at_most("etcd's bytes a block, merged", (settled_bytes(etcd) - empty_bytes) / BLOCKS, "bytes", 60)
        yield at_most(f"restart of a master with {BLOCKS:,} blocks", restart_s(etcd, prefix), "s", 6)
    yield from churn()
    for row in publish_rows([]):
        yield at_least("put by a client and published by a node and a master", row.value, "blocks/s", 100_000)


def churn() -> Iterator[BenchRow]:
    with server(f"--quota-backend-bytes={QUOTA_BYTES}") as etcd:
        catalog = EtcdCatalog([etcd.host_port], timing=EtcdTiming(10.0), bounds=MaintenanceLimits(0.25, QUOTA_BYTES))
        elected(catalog)
        first_bytes = written_bytes = 0
        live: list[BlockPuts] = []
        commits = prompts(1 << 40)
        began_s, blocks = time.monotonic(), 0
        while written_bytes < QUOTAS * QUOTA_BYTES:
            changes: list[Change] = []
            for _commit in range(LIVE_COMMITS // 4):
                live.append(next(commits))
                changes.append(live[-1])
            while len(live) > LIVE_COMMITS:
                changes.append(BlockDeletes("bench", live.pop(0).keys))
            commit(catalog, [[change] for change in changes])
            blocks += COMMIT * LIVE_COMMITS // 4
            written_bytes += COMMIT * LIVE_COMMITS // 4 * (60 + 20)
            if not first_bytes and written_bytes > QUOTA_BYTES:
                first_bytes = size_bytes(etcd)
        name = f"etcd's size after {QUOTAS} quotas' worth of churn / after one, at {COMMIT * LIVE_COMMITS:,} blocks"
        yield at_most(name, size_bytes(etcd) / first_bytes, "ratio", 1.5)
        yield BenchRow("churn: blocks that came and went", blocks / (time.monotonic() - began_s), "blocks/s")
        catalog.close()


@contextmanager
def server(*flags: str) -> Iterator[EtcdServer]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=memory if memory.is_dir() else None) as folder:
        etcd = EtcdServer(Path(folder), *flags)
        etcd.start()
        try:
            yield etcd
        finally:
            etcd.remove()


def prompts(blocks: int) -> Iterator[BlockPuts]:
    rng, size = random.Random(1), COMMIT
    for begin in range(0, blocks, size):
        keys = [rng.randbytes(16) for _block in range(size)]
        parents = [b"" if number % PROMPT == 0 else keys[number - 1] for number in range(size)]
        checksums, generations = [rng.getrandbits(64) for _block in keys], [(1 << 60) + begin + number for number in range(size)]
        yield BlockPuts("bench", keys, [1 << 16] * size, checksums, generations, ["bench"] * size, parents, [(1,)] * size)


def commit(catalog: EtcdCatalog, commits: "Iterable[list[Change]] | Iterable[BlockPuts]") -> float:
    """Seconds until all are durable."""
    free, durable, failures = threading.Semaphore(WAITING), threading.Semaphore(0), list[KVStoreError]()

    def done(error: KVStoreError | None) -> None:
        failures.extend([error] if error else [])
        free.release()
        durable.release()

    began_s = time.monotonic()
    count = 0
    for changes in commits:
        free.acquire()
        catalog.commit([changes] if isinstance(changes, BlockPuts) else changes, done)
        count += 1
    for _commit in range(count):
        assert durable.acquire(timeout=PATIENCE_S)
    assert not failures, failures
    return time.monotonic() - began_s


def await_merged(etcd: EtcdServer) -> None:
    """Until nothing is written for a second."""
    revision = 0
    while revision != (revision := status(etcd).header.revision):
        time.sleep(1.0)


def restart_s(etcd: EtcdServer, prefix: str) -> float:
    """From the start of a master's process until it owns the catalog."""
    return restart(etcd, prefix)[0]


def restart(etcd: EtcdServer, prefix: str) -> tuple[float, int]:
    """As `restart_s`, and the master's resident bytes then."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        master = MasterProcess(Path(folder), ("--catalog", f"etcd://{etcd.host_port}{prefix}"))
        began_s = time.monotonic()
        place = master.start()
        role = place.role
        while role != "owner":
            role = master.next_line()["event"]
        took_s = time.monotonic() - began_s
        with place.stub() as stub:
            resident_bytes = int(stub.Status(pb.StatusRequest(), timeout=PATIENCE_S).rss_bytes)
        master.stop()
    return took_s, resident_bytes


def settled_bytes(etcd: EtcdServer) -> int:
    """The size of etcd's database without history and without free pages."""
    with grpc.insecure_channel(etcd.host_port) as channel:
        kv, maintenance = rpc_pb2_grpc.KVStub(channel), rpc_pb2_grpc.MaintenanceStub(channel)
        revision = kv.Put(rpc_pb2.PutRequest(key=b"settled")).header.revision
        kv.Compact(rpc_pb2.CompactionRequest(revision=revision, physical=True))
        maintenance.Defragment(rpc_pb2.DefragmentRequest())
    return size_bytes(etcd)


def size_bytes(etcd: EtcdServer) -> int:
    return int(status(etcd).dbSize)


def status(etcd: EtcdServer) -> rpc_pb2.StatusResponse:
    with grpc.insecure_channel(etcd.host_port) as channel:
        return rpc_pb2_grpc.MaintenanceStub(channel).Status(rpc_pb2.StatusRequest())
