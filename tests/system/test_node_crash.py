"""A node killed with SIGKILL and started again with the same name and folder: its NVMe blocks are served, all others are misses."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.sync import Client
from tests.system import full_disk_node
from tests.system.history import value_of
from tests.system.running import System, running_system, until

BLOCK_BYTES = 128 << 10
DRAM_BLOCKS, ALL_BLOCKS = 32, 96


def key_of(number: int) -> bytes:
    return b"block-%d" % number


def is_on_nvme(client: Client, keys: list[bytes]) -> list[bool]:
    return [any("nvme" in one.tiers for one in found) for found in client.locate(keys)]


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[System]:
    """One node whose NVMe has room for all blocks, its DRAM for a third of them."""
    with running_system(tmp_path, f"--dram {DRAM_BLOCKS * BLOCK_BYTES} --nvme {tmp_path / 'nvme'}:64MiB") as started:
        yield started


@pytest.mark.promise("restart-keeps-nvme")
def test_crash_keeps_nvme_blocks_and_loses_dram_only_ones(tiered: System) -> None:
    keys = [key_of(number) for number in range(ALL_BLOCKS)]
    with tiered.client() as client:
        for key in keys:
            assert client.put(key, value_of(key, 0, BLOCK_BYTES))
        tiered.await_settled()
        durable = is_on_nvme(client, keys)
        assert ALL_BLOCKS - DRAM_BLOCKS <= durable.count(True) < ALL_BLOCKS
        tiered.kill_node()
        until(lambda: not any(client.exists_batch(keys)), "the directory forgets the dead node's blocks")
        assert client.get_batch(keys) == [None] * ALL_BLOCKS
        tiered.start_node()
        assert client.exists_batch(keys) == durable
        values = client.get_batch(keys)
        assert [value is not None for value in values] == durable
        assert all(value in (None, value_of(key, 0, BLOCK_BYTES)) for key, value in zip(keys, values, strict=True))
        assert client.put_batch(keys, [value_of(key, 1, BLOCK_BYTES) for key in keys]) == [not was for was in durable]


@pytest.mark.promise("shm-reads-whole")
def test_client_cached_locations_are_corrected_after_crash(tiered: System) -> None:
    key = key_of(0)
    with tiered.client() as client:
        assert client.put(key, value_of(key, 0, BLOCK_BYTES))
        assert client.get(key) == value_of(key, 0, BLOCK_BYTES)
        tiered.kill_node()
        tiered.start_node()
        assert client.get(key) is None
        assert client.put(key, value_of(key, 1, BLOCK_BYTES))
        assert client.get(key) == value_of(key, 1, BLOCK_BYTES)


@pytest.mark.promise("remove-stays-removed")
@pytest.mark.parametrize("is_put_again", [False, True])
def test_a_removed_block_does_not_come_back_from_nvme(tiered: System, is_put_again: bool) -> None:
    keys = [key_of(number) for number in range(ALL_BLOCKS)]
    with tiered.client() as client:
        for key in keys:
            client.put(key, value_of(key, 0, BLOCK_BYTES))
        tiered.await_settled()
        key = keys[is_on_nvme(client, keys).index(True)]
        assert client.remove([key]) == 1
        if is_put_again:
            assert client.put(key, value_of(key, 1, BLOCK_BYTES))
        tiered.kill_node()
        tiered.start_node()
        assert client.get(key) is None
        assert client.exists(key) is False


@pytest.mark.promise("remove-stays-removed")
def test_removed_blocks_do_not_return_after_failed_deletes(tmp_path: Path) -> None:
    """The disk is full when they are removed; the removal was acknowledged, and then the node is killed."""
    keys = [key_of(number) for number in range(ALL_BLOCKS)]
    with System(tmp_path) as system:
        system.node_module = "tests.system.full_disk_node"
        system.start_master()
        system.start_node("n0", "--dram", str(DRAM_BLOCKS * BLOCK_BYTES), "--nvme", f"{tmp_path / 'nvme'}:64MiB")
        with system.client() as client:
            for key in keys:
                client.put(key, value_of(key, 0, BLOCK_BYTES))
            system.await_settled()
            durable = [key for key, is_durable in zip(keys, is_on_nvme(client, keys), strict=True) if is_durable]
            removed, kept = durable[:8], durable[8:]
            (tmp_path / "nvme" / full_disk_node.MARK).touch()
            assert client.remove(removed) == len(removed)
            for _ in range(2):
                system.kill_node()
                system.start_node()
                assert client.get_batch(removed) == [None] * len(removed)
                assert client.get_batch(kept) == [value_of(key, 0, BLOCK_BYTES) for key in kept]
            (tmp_path / "nvme" / full_disk_node.MARK).unlink()
            assert client.put_batch(removed, [value_of(key, 1, BLOCK_BYTES) for key in removed]) == [True] * len(removed)
            assert client.get_batch(removed) == [value_of(key, 1, BLOCK_BYTES) for key in removed]
