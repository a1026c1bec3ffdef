"""A catalog of 10,000,000 blocks in a real etcd of one member: how fast they come in, and how long a master takes that starts on them.

As catalog.py, whose parts it is made of; minutes, and some gigabytes of memory, so it is run by name only.
"""

import uuid
from collections.abc import Iterator
from typing import Final

from benchmarks.masters.catalog import await_merged, commit, prompts, restart, server, settled_bytes
from kvstore.cli.tools.bench import BenchRow, at_most
from kvstore.master.catalogs.etcd.catalog import EtcdCatalog, EtcdTiming
from tests.master.catalogs.conformance import elected

BLOCKS: Final = 10_000_000
QUOTA_BYTES: Final = 8 << 30
RESTART_S: Final = 60


def rows() -> Iterator[BenchRow]:
    with server(f"--quota-backend-bytes={QUOTA_BYTES}") as etcd:
        empty_bytes, prefix = settled_bytes(etcd), f"/{uuid.uuid4()}"
        _took_s, alone_bytes = restart(etcd, f"{prefix}-empty")
        catalog = EtcdCatalog([etcd.host_port], prefix=prefix, timing=EtcdTiming(10.0))
        elected(catalog)
        yield BenchRow(f"{BLOCKS:,} blocks: publishing by the catalog alone", BLOCKS / commit(catalog, prompts(BLOCKS)), "blocks/s")
        await_merged(etcd)
        catalog.close()
        yield at_most(f"{BLOCKS:,} blocks: etcd's bytes a block, merged", (settled_bytes(etcd) - empty_bytes) / BLOCKS, "bytes", 60)
        took_s, resident_bytes = restart(etcd, prefix)
        yield at_most(f"{BLOCKS:,} blocks: restart of a master, until it owns the catalog", took_s, "s", RESTART_S)
        yield at_most(f"{BLOCKS:,} blocks: that master's memory a block", (resident_bytes - alone_bytes) / BLOCKS, "bytes", 150)
