"""A node that is away while blocks are removed, for a while or for good: every removal is done, and nothing removed comes back."""

from pathlib import Path

import pytest

from kvstore.client.control import Control
from kvstore.client.sync import Client
from tests.system.running import System, until

KEYS = [b"key-%d" % number for number in range(40)]
VALUE = bytes(range(256)) * 16
FLAGS = ("--dram", "1MiB", "--high-watermark", "0.02", "--low-watermark", "0.01")
"""Watermarks with which each block goes to NVMe at once, and outlives the process."""


def start(system: System, *names: str) -> None:
    for name in names:
        system.start_node(name, *FLAGS, "--nvme", f"{system.folder / name}-nvme:64MiB")


def put_on_nvme(system: System, client: Client, name: str) -> None:
    client.put_batch(KEYS, [VALUE] * len(KEYS))
    until(lambda: stored(system, name) >= len(KEYS) - 5, "blocks are demoted")


def stored(system: System, name: str) -> int:
    return next(tier.blocks for tier in system.node_status(name).tiers if tier.name == "nvme")


@pytest.mark.promise("remove-stays-removed")
def test_more_removals_than_tombstones_hold_when_node_returns(tmp_path: Path) -> None:
    with System(tmp_path, f"lmdb:{tmp_path / 'catalog'}") as system:
        system.start_master(0, "--max-kept-removals", "5")
        start(system, "n0")
        with system.client() as client:
            put_on_nvme(system, client, "n0")
            system.kill_node()
            start(system, "n1")
            client.put_batch(KEYS, [VALUE] * len(KEYS))
            assert client.remove(KEYS[:30]) == 30
            system.masters[0].kill()
            system.start_master(0, "--max-kept-removals", "5")
            system.await_alive("n1")
            system.start_node("n0")
            system.await_alive("n0")
            assert client.exists_batch(KEYS) == [False] * 30 + [True] * 10
            until(lambda: stored(system, "n0") <= 10, "the node has dropped what was removed")
            assert client.put_batch(KEYS[:5], [VALUE] * 5) == [True] * 5


@pytest.mark.promise("remove-stays-removed")
def test_a_forgotten_node_brings_nothing_back(tmp_path: Path) -> None:
    with System(tmp_path, f"lmdb:{tmp_path / 'catalog'}") as system:
        system.start_master()
        start(system, "n0")
        with system.client() as client:
            put_on_nvme(system, client, "n0")
            system.kill_node()
            start(system, "n1")
            until(lambda: system.node_status("n0").state == "dead", "the node is dead")
            with Control.find(system.settings) as control:
                control.forget("n0")
            client.put_batch(KEYS[:10], [VALUE] * 10)
            assert client.remove(KEYS[:5]) == 5
            system.masters[0].kill()
            system.start_master()
            system.await_alive("n1")
            assert [node.name for node in system.status().nodes] == ["n1"]
            system.start_node("n0")
            system.await_alive("n0")
            assert client.exists_batch(KEYS) == [False] * 5 + [True] * 5 + [False] * 30
            until(lambda: stored(system, "n0") == 0, "the node has dropped what it had")
