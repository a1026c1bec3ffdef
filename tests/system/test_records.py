"""The setting `records`: blocks that are found after a restart of the master, and of all daemons, with each value."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.history import value_of
from tests.system.running import STATUS_POLL_S, System, running_system, until

BLOCK_BYTES = 64 << 10
DRAM_BLOCKS, ALL_BLOCKS = 16, 40
KEYS = [b"block-%d" % number for number in range(ALL_BLOCKS)]
VALUES = [value_of(key, 0, BLOCK_BYTES) for key in KEYS]


def records(system: System) -> int:
    return system.status().records


@contextmanager
def with_records(folder: Path, choice: str) -> Iterator[System]:
    with running_system(
        folder, f"--dram {DRAM_BLOCKS * BLOCK_BYTES} --nvme {folder / 'nvme'}:32MiB", catalog="lmdb:", master=f"--records {choice}"
    ) as system:
        yield system


def in_nvme(system: System) -> int:
    """Blocks that the node has there, once it moves none any more."""
    return next(tier.blocks for tier in system.await_settled().tiers if tier.name == "nvme")


@pytest.mark.promise("records-durable")
@pytest.mark.parametrize("choice", ["outliving", "membership"])  # "all": test_master_crash.py
def test_restart_finds_each_block_that_its_node_has(tmp_path: Path, choice: str) -> None:
    with with_records(tmp_path, choice) as system:
        with system.client() as client:
            assert client.put_batch(KEYS, VALUES) == [True] * ALL_BLOCKS
            durable = in_nvme(system)
            assert durable >= ALL_BLOCKS - DRAM_BLOCKS
            expected = {"outliving": durable, "membership": 0}[choice]
            until(lambda: records(system) == expected, f"{expected} records", every_s=STATUS_POLL_S)
            system.masters[0].kill()
            system.start_master(0, "--records", choice)
            system.await_alive("n0")
            until(lambda: all(client.exists_batch(KEYS)), "the master knows what the node has told")
            assert client.get_batch(KEYS) == VALUES
            assert records(system) == expected
        system.masters[0].kill()
        system.kill_node()
        system.start_master(0, "--records", choice)
        system.start_node()
        with system.client() as client:
            found = client.get_batch(KEYS)
        assert sum(value is not None for value in found) == durable
        assert all(value in (None, put) for value, put in zip(found, VALUES, strict=True))


@pytest.mark.promise("records-durable")
@pytest.mark.parametrize(("choice", "expected"), [("all", 1), ("outliving", 1), ("membership", 0)])
def test_pin_survives_restart_with_and_without_record(tmp_path: Path, choice: str, expected: int) -> None:
    with running_system(tmp_path, f"--dram {DRAM_BLOCKS * BLOCK_BYTES}", catalog="lmdb:", master=f"--records {choice}") as system:
        with system.client() as client:
            client.put(KEYS[0], VALUES[0])
            assert client.pin([KEYS[0]]) == [True]
            assert records(system) == expected
            system.masters[0].kill()
            system.start_master(0, "--records", choice)
            system.await_alive("n0")
            for key, value in zip(KEYS[1:], VALUES[1:], strict=True):
                client.put(key, value)
            assert client.get(KEYS[0]) == VALUES[0]
            assert None in client.get_batch(KEYS[1:]), "there was no room for all"


@pytest.mark.promise("records-durable")
def test_records_of_old_setting_vanish_after_resync(tmp_path: Path) -> None:
    with with_records(tmp_path, "all") as system:
        with system.client() as client:
            client.put_batch(KEYS, VALUES)
            in_nvme(system)
            assert records(system) == ALL_BLOCKS
            system.masters[0].kill()
            system.start_master(0, "--records", "membership")
            system.await_alive("n0")
            until(lambda: records(system) == 0 and all(client.exists_batch(KEYS)), "no records", every_s=STATUS_POLL_S)
            assert client.get_batch(KEYS) == VALUES
