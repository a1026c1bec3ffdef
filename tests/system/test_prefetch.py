"""Prefetches, with real processes: blocks on NVMe and at another node are in this host's DRAM when they are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.client.instances.client import InstanceReport, InstanceRole, RequestPlacement, SchedulerClient
from kvstore.client.sync import Client
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, MIB, STATUS_POLL_S, System, running_system, until

KEYS = [b"prompt-%d" % number for number in range(32)]
VALUES = [value_of(key, 0, 64 << 10) for key in KEYS]
PARENTS = [None, *KEYS[:-1]]
DRAM_BYTES = 64 * MIB
"""A sixteenth of it has room for the prompt twice."""


def await_counter(system: System, name: str, count: int, node: str = "n0") -> None:
    until(lambda: system.node_status(node).counters[name] == count, f"{name} of {node} is {count}", every_s=STATUS_POLL_S)


def tiers_of(client: Client, node: str) -> set[tuple[str, ...]]:
    """The tiers in which that node has the prompt's blocks."""
    return {location.tiers for found in client.locate(KEYS) for location in found if location.node == node}


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[System]:
    """A node with the prompt on NVMe only, since DRAM was filled after it."""
    with running_system(tmp_path, f"--dram 64MiB --nvme {tmp_path / 'nvme'}:512MiB --policy lru") as system:
        with system.client() as client:
            client.put_batch(KEYS, VALUES, parents=PARENTS)
            for number in range(DRAM_BYTES // MIB):
                client.put(b"other-%d" % number, bytes(MIB))
            system.await_settled()
            assert tiers_of(client, "n0") == {("nvme",)}
        yield system


@pytest.mark.promise("prefetch-bounded")
def test_blocks_on_nvme_are_brought_and_found_useful(cold: System) -> None:
    with cold.client() as client:
        assert client.prefetch(KEYS) == len(KEYS)
        await_counter(cold, "prefetched_blocks", len(KEYS))
        until(lambda: tiers_of(client, "n0") == {("dram", "nvme")}, "the directory knows")
        assert client.get_batch(KEYS[:20]) == VALUES[:20]
        await_counter(cold, "prefetches_useful", 20)
        for number in range(2 * DRAM_BYTES // MIB):
            client.put(b"more-%d" % number, bytes(MIB))
        await_counter(cold, "prefetches_wasted", 12)
        assert client.get_batch(KEYS) == VALUES
        await_counter(cold, "prefetched_unread_bytes", 0)


@pytest.mark.promise("prefetch-bounded")
def test_unread_prefetches_leave_most_of_dram_alone(cold: System) -> None:
    with cold.client() as client:
        cold_keys = [key for key, found in zip(_others(), client.locate(_others()), strict=True) if found and found[0].tiers == ("nvme",)]
        taken = client.prefetch([*KEYS, *cold_keys])
        assert taken == len(KEYS) + min(len(cold_keys), 2), "2 MiB are left of 4"
        await_counter(cold, "prefetched_blocks", taken)
        await_counter(cold, "prefetches_refused", len(KEYS) + len(cold_keys) - taken)


def _others() -> list[bytes]:
    return [b"other-%d" % number for number in range(DRAM_BYTES // MIB)]


def test_a_decision_of_the_scheduler_brings_blocks_up(cold: System) -> None:
    with SchedulerClient(ClientSettings(master=cold.address, deadline_s=DEADLINE_S)) as scheduler, cold.client() as client:
        scheduler.report(InstanceReport(name="p", role=InstanceRole.BOTH, address="http://p", node="n0"))
        placed = scheduler.schedule(KEYS, block_tokens=16, input_tokens=16 * len(KEYS) + 1, output_tokens=1)
        assert isinstance(placed, RequestPlacement)
        assert placed.prefix_blocks == len(KEYS)
        await_counter(cold, "prefetched_blocks", len(KEYS))
        assert client.get_batch(KEYS) == VALUES
        await_counter(cold, "prefetches_useful", len(KEYS))


@contextmanager
def hidden(system: System, node: str) -> Iterator[None]:
    """Clients that are made meanwhile take the node to be on another host."""
    [path] = (system.folder / node).glob("*.sock")
    away = path.with_suffix(".away")
    path.rename(away)
    try:
        yield
    finally:
        away.rename(path)


@pytest.mark.promise("prefetch-bounded")
def test_blocks_of_another_node_are_copied_here(tmp_path: Path) -> None:
    with running_system(tmp_path, "--dram 64MiB", nodes=("n0", "n1")) as system:
        with hidden(system, "n0"), system.client() as writer:
            writer.put_batch(KEYS, VALUES, parents=PARENTS)
        with hidden(system, "n1"), system.client() as client:
            assert {found[0].node for found in client.locate(KEYS)} == {"n1"}
            assert client.prefetch([*KEYS, b"nowhere"], "local") == len(KEYS) + 1
            await_counter(system, "prefetched_blocks", len(KEYS))
            await_counter(system, "prefetches_waiting", 0)
            assert tiers_of(client, "n0") == tiers_of(client, "n1") == {("dram",)}
            assert client.get_batch(KEYS) == VALUES
            await_counter(system, "prefetches_useful", len(KEYS))
            counters = system.node_status("n0").counters
            assert (counters["copied_blocks"], counters["copied_blocks_prefetch"]) == (len(KEYS), len(KEYS))


def test_a_drained_node_prefetches_nothing(cold: System) -> None:
    with cold.client() as client:
        client.exists(KEYS[0])
        with Control.find(cold.settings) as control:
            control.drain("n0", to="nvme")
        until(lambda: client.prefetch(KEYS) == 0, "the node drains")
        assert client.get_batch(KEYS) == VALUES
