"""Home copies, with real processes: the memory of two nodes is one pool, though one host writes all blocks."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.sync import Client
from kvstore.master.directory.placement.home_copies import REFRESH_NS, SKIPPED
from kvstore.protocol.catalog_messages import COPY_REASONS
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, STATUS_POLL_S, System, until
from tests.system.test_acks import tied

BLOCK_BYTES = 64 << 10
DRAM_BLOCKS = 32
AT_ONCE = 4
"""Blocks that are put before their copies are awaited."""
SETTLE_S = 0.3
"""The master orders copies ten times a second."""
KEYS = [b"block-%d" % number for number in range(2 * DRAM_BLOCKS)]


def values(keys: list[bytes]) -> list[bytes]:
    return [value_of(key, 0, BLOCK_BYTES) for key in keys]


def put(client: Client, keys: list[bytes]) -> None:
    assert client.put_batch(keys, values(keys)) == [True] * len(keys)
    client.flush(deadline_s=DEADLINE_S)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[System]:
    """A master and n0, which holds half of KEYS."""
    with System(tmp_path) as system:
        system.start_master()
        start_small(system, "n0")
        yield system


def start_small(system: System, name: str) -> None:
    system.start_node(name, "--dram", str(DRAM_BLOCKS * BLOCK_BYTES), "--policy", "lru")


def put_slowly(system: System, client: Client, keys: list[bytes]) -> None:
    """Put a few at a time. Copies and heartbeats keep up: each batch waits for all secondary copies to be marked."""

    def is_quiet() -> bool:
        return system.node_status("n0").counters["secondary_blocks"] >= system.status().counters["home_copies"]

    for begin in range(0, len(keys), AT_ONCE):
        put(client, keys[begin : begin + AT_ONCE])
        time.sleep(SETTLE_S)
        until(is_quiet, "secondary copies are marked", every_s=STATUS_POLL_S)


@pytest.mark.promise("last-replica-last")
def test_blocks_stay_in_the_cluster_while_another_node_has_space(pool: System) -> None:
    pool.start_node("n1", "--dram", "32MiB")
    with tied(pool, "n0") as client:
        put_slowly(pool, client, KEYS)
        pool.await_settled()
        assert [key for key, found in zip(KEYS, client.exists_batch(KEYS), strict=True) if not found] == []
        assert client.get_batch(KEYS) == values(KEYS)
        counters = pool.status().counters
        assert counters["home_copies"] >= len(KEYS) - DRAM_BLOCKS
        assert counters["home_copied_bytes"] >= (counters["home_copies"] - 1) * BLOCK_BYTES, "a client's first block is a byte"


@pytest.mark.promise("observable")
def test_status_shows_why_blocks_moved_and_what_leaves_next(pool: System) -> None:
    pool.start_node("n1", "--dram", "32MiB")
    with tied(pool, "n0") as client:
        put_slowly(pool, client, KEYS)
        pool.await_settled()
    status, source, home = pool.status(), pool.node_status("n0"), pool.node_status("n1")
    assert {f"home_copies_skipped_{reason}" for reason in SKIPPED} <= status.counters.keys()
    assert sum(home.counters[f"copied_blocks_{reason}"] for reason in COPY_REASONS) == home.counters["copied_blocks_home"] > 0
    assert source.counters["secondary_blocks"] == home.counters["copied_blocks_home"]
    [tier] = source.tiers
    left = source.counters["secondary_blocks"] - tier.evictions_by_reason["secondary"]
    assert tier.next_victim.reason == ("secondary" if left else "")
    assert not tier.next_victim.HasField("hits_per_byte_s")
    assert 0 < tier.evictions_by_reason["secondary"] <= tier.evictions == sum(tier.evictions_by_reason.values())
    assert home.tiers[0].next_victim.reason == ""


def test_full_nodes_share_the_blocks_of_one_writer(pool: System) -> None:
    start_small(pool, "n1")
    more = [b"more-%d" % number for number in range(4 * DRAM_BLOCKS)]
    with tied(pool, "n0") as client:
        put_slowly(pool, client, more)
        pool.await_settled()
        newest = more[-DRAM_BLOCKS - DRAM_BLOCKS // 2 :]
        present = sum(client.exists_batch(newest))
        assert present > DRAM_BLOCKS, "more than one node holds"
        found = client.get_batch(newest)
        assert all(value in (None, right) for value, right in zip(found, values(newest), strict=True))


@pytest.mark.promise("last-replica-last")
def test_copies_are_primary_again_when_their_home_dies(pool: System) -> None:
    """Then n0 evicts the blocks that were read longest ago, not these."""
    pool.start_node("n1", "--dram", "32MiB")
    with tied(pool, "n0") as client:
        put(client, KEYS[: DRAM_BLOCKS * 7 // 8])
        time.sleep(2 * REFRESH_NS / 1e9)  # until the master takes n1 for a home
        put_slowly(pool, client, KEYS[DRAM_BLOCKS * 7 // 8 : DRAM_BLOCKS - 1])
        until(lambda: pool.status().counters["home_copies"] > 0, "blocks of the nearly full node are copied", every_s=STATUS_POLL_S)
        pool.await_settled()
        until(lambda: pool.node_status("n0").counters["secondary_blocks"] > 0, "and marked", every_s=STATUS_POLL_S)
        time.sleep(SETTLE_S)
        moved = [key for key, places in zip(KEYS, client.locate(KEYS[: DRAM_BLOCKS - 1]), strict=False) if len(places) == 2]
        pool.nodes["n1"].kill()
        until(lambda: pool.node_status("n0").counters["primary_again"] == len(moved), "n0 is notified", every_s=STATUS_POLL_S)
        put(client, KEYS[DRAM_BLOCKS : DRAM_BLOCKS + len(moved)])
        pool.await_settled("n0")
        assert client.get_batch(moved) == values(moved)
        assert client.exists_batch(KEYS[: len(moved) - 1]) == [False] * (len(moved) - 1)


def test_masters_of_partitions_choose_one_home_for_a_prompt(tmp_path: Path) -> None:
    prompts = [[b"prompt-%d-%d" % (number, block) for block in range(2 * AT_ONCE)] for number in range(6)]
    with System(tmp_path) as system:
        system.start_master(0, "--partitions", "4")
        start_small(system, "n0")
        for name in ("n1", "n2", "n3"):
            system.start_node(name, "--dram", "256MiB")  # so large that their free shares, and weights, stay equal
        with tied(system, "n0") as client:
            put(client, KEYS[:DRAM_BLOCKS])
            system.await_settled()
            time.sleep(2 * REFRESH_NS / 1e9)  # until the masters of all partitions take all nodes for homes
            for keys in prompts:
                for begin in range(0, len(keys), AT_ONCE):  # as two turns
                    part = keys[begin : begin + AT_ONCE]
                    parents = [keys[begin - 1] if begin else None, *part[:-1]]
                    assert client.put_batch(part, values(part), parents=parents) == [True] * len(part)
                    client.flush(deadline_s=DEADLINE_S)
                    time.sleep(SETTLE_S)

            def homes() -> list[set[str]]:
                return [{place.node for places in client.locate(keys) for place in places} - {"n0"} for keys in prompts]

            until(lambda: all(homes()), "each prompt is copied", every_s=STATUS_POLL_S)
            found = homes()
    assert all(len(home) == 1 for home in found), found
    assert len(set.union(*found)) > 1, "six prompts are not all at one"


@pytest.mark.promise("last-replica-last")
def test_rate_zero_evicts_despite_space_elsewhere(tmp_path: Path) -> None:
    with System(tmp_path) as system:
        system.start_master(0, "--home-copy-rate", "0")
        start_small(system, "n0")
        system.start_node("n1", "--dram", "32MiB")
        with tied(system, "n0") as client:
            put(client, KEYS[:DRAM_BLOCKS])
            put(client, KEYS[DRAM_BLOCKS:])
            system.await_settled()
            assert client.get_batch(KEYS[: DRAM_BLOCKS - 1]) == [None] * (DRAM_BLOCKS - 1)
            assert system.status().counters["home_copies"] == 0
