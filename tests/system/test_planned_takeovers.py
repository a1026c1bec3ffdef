"""Planned handover of a partition, at a shutdown or a rebalance: readers wait briefly and have no miss."""

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.client.sync import Client
from tests.system.running import DEADLINE_S, STATUS_POLL_S, System, until

KEYS = [b"block-%d" % number for number in range(400)]
VALUES = [b"value %d" % number for number in range(400)]
FLAGS = ("--lease-ttl-s", "5", "--takeover-wait-s", "60")
"""No lease ends, and no node is given up, for want of a processor."""
PARTITIONS = 4
PAUSE_S = 0.005
"""Of a reader after each look. Without it, readers take the processor that the takeover needs."""


class Reader(threading.Thread):
    """Looks for all blocks, by turns whether they are there and what they are, until it is ended."""

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._over = threading.Event()
        self.looks = 0
        self.missed: list[int] = []
        """Number of missed blocks of each lookup that missed any."""
        self.start()

    def run(self) -> None:
        while not self._over.wait(PAUSE_S):
            missed = self._client.get_batch(KEYS).count(None) if self.looks % 2 else self._client.exists_batch(KEYS).count(False)
            if missed:
                self.missed.append(missed)
            self.looks += 1

    def goes_on(self) -> None:
        count = self.looks
        until(lambda: self.looks > count + 4 or not self.is_alive(), "looks that began from now on")
        assert self.is_alive(), "a call failed"

    def end(self) -> None:
        self._over.set()
        self.join(DEADLINE_S)
        assert not self.is_alive()


@contextmanager
def reading(system: System) -> Iterator[Reader]:
    """Readers of this host and of another one, while the blocks are all there. The given one has looked at them."""
    with system.client() as client, system.remote_client() as remote:
        assert all(client.put_batch(KEYS, VALUES))
        readers = [Reader(client), Reader(remote)]
        for reader in readers:
            reader.goes_on()
        yield readers[1]
        for reader in readers:
            reader.goes_on()
            reader.end()
        assert [reader.missed for reader in readers] == [[], []]


@pytest.fixture
def system(tmp_path: Path, etcd_url: str) -> Iterator[System]:
    with System(tmp_path, f"{etcd_url}/{uuid.uuid4()}", masters=3) as system:
        yield system


def start(system: System, *masters: int, partitions: int = 1) -> None:
    for index in masters:
        system.start_master(index, "--partitions", str(partitions), *FLAGS)


def await_owned(system: System, index: int, count: int, partitions: int) -> None:
    until(lambda: len(system.owned(index, partitions)) == count, f"master {index} owns {count} of {partitions}", every_s=STATUS_POLL_S)


@pytest.mark.promise("failover")
def test_planned_takeover_has_no_read_misses(system: System) -> None:
    start(system, 0, 1)
    system.start_nodes("--dram", "32MiB", names=("n0", "n1", "n2"))
    with reading(system) as reader:
        system.masters[0].stop()
        await_owned(system, 1, 1, 1)
        reader.goes_on()
        start(system, 2)
        system.masters[1].stop()
        await_owned(system, 2, 1, 1)


@pytest.mark.promise("failover")
def test_partition_moves_to_and_from_master_without_misses(system: System) -> None:
    start(system, 0, partitions=PARTITIONS)
    system.start_nodes("--dram", "32MiB", names=("n0", "n1", "n2"))
    with reading(system) as reader:
        start(system, 1, partitions=PARTITIONS)
        await_owned(system, 1, PARTITIONS // 2, PARTITIONS)
        reader.goes_on()
        system.masters[1].stop()
        await_owned(system, 0, PARTITIONS, PARTITIONS)
