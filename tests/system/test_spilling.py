"""Spilling, with real processes: what has no room at one node goes to another that has some, if the operator says so."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.sync import Client
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, STATUS_POLL_S, System, until
from tests.system.test_acks import tied

BLOCK_BYTES = 64 << 10
DRAM_BLOCKS = 64
AT_ONCE = 8
"""Blocks that are put before it is waited until as many may leave."""
FREE_SHARE = 0.3
"""Half of it is more than is put at once: what is put finds room, or a node that spills."""
KEYS = [b"block-%d" % number for number in range(2 * DRAM_BLOCKS)]
OWN = [b"own-%d" % number for number in range(32)]


def values(keys: list[bytes]) -> list[bytes]:
    return [value_of(key, 0, BLOCK_BYTES) for key in keys]


def put(client: Client, keys: list[bytes]) -> None:
    assert client.put_batch(keys, values(keys)) == [True] * len(keys)
    client.flush(deadline_s=DEADLINE_S)


def room(system: System) -> int:
    """Blocks that n0 takes before one leaves that is nowhere else, as of its last heartbeat."""
    node = system.node_status()
    [dram] = node.tiers
    return (dram.capacity_bytes - dram.used_bytes) // BLOCK_BYTES + node.counters["spares"]


def evictions_of(system: System, name: str) -> int:
    """Blocks that have left the node."""
    [dram] = system.node_status(name).tiers
    return dram.evictions


@pytest.fixture
def spilling(tmp_path: Path) -> Iterator[System]:
    """A master that has blocks spilled, and n0, which has room for half of KEYS."""
    with System(tmp_path) as system:
        system.start_master(0, "--spill", "--spill-free-share", str(FREE_SHARE))
        start_small(system, "n0")
        yield system


def start_small(system: System, name: str) -> None:
    system.start_node(name, "--dram", str(DRAM_BLOCKS * BLOCK_BYTES), "--policy", "lru")


@pytest.mark.promise("last-replica-last")
def test_nothing_leaves_the_cluster_while_another_node_has_room(spilling: System) -> None:
    spilling.start_node("n1", "--dram", "32MiB")
    with tied(spilling, "n0") as client:
        for begin in range(0, len(KEYS), AT_ONCE):
            spilling.await_settled()
            until(lambda: room(spilling) >= AT_ONCE, "what leaves next is at n1", every_s=STATUS_POLL_S)
            put(client, KEYS[begin : begin + AT_ONCE])
        spilling.await_settled()
        assert client.get_batch(KEYS) == values(KEYS)
        over = len(KEYS) - DRAM_BLOCKS

        def all_is_told() -> bool:
            """Each tells when it looks: the master of copies that have arrived, nodes with their heartbeats."""
            told = (
                evictions_of(spilling, "n0"),
                spilling.status().counters["spilled_blocks"],
                spilling.node_status("n1").counters["guest_blocks"],
            )
            return min(told) >= over

        until(all_is_told, "what had no room was spilled", every_s=STATUS_POLL_S)
        counters = spilling.status().counters
        assert counters["spilled_bytes"] >= (counters["spilled_blocks"] - 1) * BLOCK_BYTES, "a client's first one is a byte"


@pytest.mark.promise("last-replica-last")
def test_spilling_disabled_evicts_despite_space_elsewhere(tmp_path: Path) -> None:
    with System(tmp_path) as system:
        system.start_master()
        start_small(system, "n0")
        system.start_node("n1", "--dram", "32MiB")
        with tied(system, "n0") as client:
            put(client, KEYS[:DRAM_BLOCKS])
            put(client, KEYS[DRAM_BLOCKS:])
            system.await_settled()
            assert client.get_batch(KEYS[: DRAM_BLOCKS - 1]) == [None] * (DRAM_BLOCKS - 1)
            assert system.status().counters["spilled_blocks"] == 0


@pytest.mark.promise("last-replica-last")
def test_nothing_leaves_a_node_for_what_another_one_spills(spilling: System) -> None:
    start_small(spilling, "n1")
    with tied(spilling, "n0") as client, tied(spilling, "n1") as other:
        put(other, OWN)
        put(client, KEYS[: DRAM_BLOCKS - 1])
        until(lambda: spilling.node_status("n1").counters["guest_blocks"] > 0, "n1 has guests", every_s=STATUS_POLL_S)
        for begin in range(DRAM_BLOCKS - 1, len(KEYS), AT_ONCE):
            put(client, KEYS[begin : begin + AT_ONCE])
            spilling.await_settled()
        assert evictions_of(spilling, "n1") == 0
        assert other.get_batch(OWN) == values(OWN)
        assert spilling.node_status("n1").counters["guest_blocks"] <= DRAM_BLOCKS - len(OWN)
