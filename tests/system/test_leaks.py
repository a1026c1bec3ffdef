"""Nothing is left behind by much use: descriptors of clients and daemons, leases, open puts, reservations, connections."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.client.sync import Client
from kvstore.protocol.errors import DeadlineExceeded, Full
from tests.system.history import value_of, version_of
from tests.system.running import System, descriptors, running_system, until

OPERATIONS, THREADS, CONNECTS = 2000, 4, 50
SIZES = (500, 5_000, 100_000, 400_000)
KEYS = [b"block-%d" % number for number in range(150)]
"""Three times what DRAM has room for, so that blocks are evicted, demoted and promoted all the time."""


def mixed(client: Client, seed: int, count: int) -> None:
    """`count` operations of all kinds; every value read is checked."""
    choose = random.Random(seed)
    for _ in range(count):
        key, act = choose.choice(KEYS), choose.randrange(9)
        if act < 3:
            client.put(key, value_of(key, 0, choose.choice(SIZES)))
        elif act < 5:
            keys = choose.sample(KEYS, 8)
            for one, value in zip(keys, client.get_batch(keys), strict=True):
                assert value is None or version_of(one, value) == 0
        elif act == 5:
            with client.view(key) as memory:
                assert memory is None or version_of(key, bytes(memory)) == 0
        elif act == 6:
            client.remove([key], force=choose.random() < 0.5)
        elif act == 7:
            client.pin([key])
            client.unpin([key])
        else:
            client.exists_batch(choose.sample(KEYS, 8))


@pytest.mark.promise("no-leaks")
def test_after_much_use_everything_is_as_before(tmp_path: Path) -> None:
    with System(tmp_path) as system:
        master = system.start_master()
        node = system.start_node("n0", "--dram", "6MiB", "--nvme", f"{tmp_path / 'nvme'}:64MiB")
        with system.client() as first, system.remote_client() as second:
            for client in (first, second):
                mixed(client, 0, 50)
        before = [descriptors(pid) for pid in (master.pid, node.pid, os.getpid())]
        with system.client() as local, system.remote_client() as remote, ThreadPoolExecutor(THREADS) as threads:
            done = [threads.submit(mixed, (local, remote)[seed % 2], seed, OPERATIONS // THREADS) for seed in range(THREADS)]
            for one in done:
                one.result()
        for number in range(CONNECTS):
            with system.client() as client:
                with client.view(KEYS[number]):
                    pass
                client.put(KEYS[-number], value_of(KEYS[-number], 0, 100_000))
        for pid, count in zip((master.pid, node.pid, os.getpid()), before, strict=True):
            until(lambda pid=pid, count=count: descriptors(pid) <= count, f"{count} descriptors of {pid}")  # type: ignore[misc]
        system.await_settled()
        system.await_counters(leases=0, open_puts=0, waiting=0, connections=0, publish_backlog=0)
        until(lambda: system.status().reserved == 0, "no reservation is left")
        assert system.status().pinned == 0
        until(lambda: not any(tier.quarantined_bytes for tier in system.node_status().tiers), "no slot is kept from use")
        status = system.node_status()
        assert all(tier.used_bytes <= tier.capacity_bytes for tier in status.tiers)


@pytest.mark.promise("no-leaks")
@pytest.mark.promise("put-bounded-wait")
def test_puts_that_fail_for_want_of_room_leave_nothing_behind(tmp_path: Path) -> None:
    with running_system(tmp_path, "--dram 1MiB") as system:
        with system.client() as client:
            keys = [b"pinned-%d" % number for number in range(4)]
            client.put_batch(keys, [value_of(key, 0, 256 << 10) for key in keys])
            assert client.pin(keys) == [True] * 4
            for size in (2_000, 256 << 10):
                for number in range(2):
                    with suppress(Full, DeadlineExceeded):  # the node says which, unless it is late
                        assert not client.put(b"too much %d" % number, bytes(size), deadline_s=0.5), "there is no room"
            assert client.get_batch(keys) == [value_of(key, 0, 256 << 10) for key in keys]
            assert client.unpin(keys) == [True] * 4
            assert client.put(b"now there is", bytes(256 << 10))
        until(lambda: system.status().reserved == 0, "no reservation is left")
        system.await_counters(open_puts=0, waiting=0, leases=0)
