"""A node in a control group with a memory limit: it starts only where it fits, and then the kernel never kills it."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.testing.transfer.awaited import PATIENCE_S, eventually
from tests.memory_groups import memory_group
from tests.store.daemons import Daemon, master_flags, node_flags, running, start, until_nodes_are

MIB = 1 << 20
LIMIT_BYTES = 224 * MIB


def flags(folder: Path, master: Daemon, *memory: str) -> list[str]:
    """Of a node, with this in place of its DRAM tier."""
    given = node_flags(folder, master.facts["listen"])
    at = given.index("--dram")
    return [*given[:at], *given[at + 2 :], *memory]


@pytest.mark.promise("memory-bounded")
@pytest.mark.parametrize("nested", [False, True])
def test_node_that_exceeds_its_limit_does_not_start(tmp_path: Path, nested: bool) -> None:
    """DRAM alone is below the limit; block table, index and process come on top. The limit may be an outer group's."""
    with (
        running("master", *master_flags(tmp_path), log=tmp_path / "master.log") as master,
        memory_group(LIMIT_BYTES, nested=nested) as group,
    ):
        log = tmp_path / "node.log"
        node = start("node", *flags(tmp_path, master, "--dram", "160MiB"), log=log, prefix=group.prefix)
        assert node.wait(PATIENCE_S) == 2
        assert node.stdout is not None
        assert node.stdout.read() == ""
        node.stdout.close()
        assert group.kills == 0
        said = log.read_text()
    assert "160 MiB DRAM tier + 80 MiB block table + " in said
    assert "; the memory limit is 224 MiB (/sys/fs/cgroup/" in said
    assert "give memory 224 MiB in place of dram" in said


@pytest.mark.slow
@pytest.mark.promise("memory-bounded")
def test_node_with_memory_of_its_limit_is_filled_and_lives(tmp_path: Path) -> None:
    """Values of 4 KiB fill the DRAM tier twice; then small ones fill the block table, with an index for a client that reads."""
    with running("master", *master_flags(tmp_path), log=tmp_path / "master.log") as master, memory_group(LIMIT_BYTES) as group:
        given = flags(tmp_path, master, "--memory", f"{LIMIT_BYTES // MIB}MiB")
        with (
            running("node", *given, log=tmp_path / "node.log", prefix=group.prefix) as node,
            Client(master.facts["listen"], deadline_s=PATIENCE_S) as client,
        ):
            assert [node.line()["event"], node.line()["event"]] == ["ready", "warm"]
            tier_bytes = until_nodes_are(master, "alive").nodes[0].tiers[0].capacity_bytes
            assert LIMIT_BYTES - tier_bytes < 190 * MIB
            fill(client, b"large", 4096, 2 * tier_bytes // 4096)
            fill(client, b"small", 64, 150_000)
            assert isinstance(node.process, subprocess.Popen)
            assert node.process.poll() is None
            assert group.kills == 0
            client.flush()
            assert client.put(b"last", b"value")
            assert client.get(b"last") == b"value"

            def counters() -> Mapping[str, int]:
                return until_nodes_are(master, "alive").nodes[0].counters

            eventually(lambda: counters()["table_bytes"] > counters()["max_table_bytes"] / 2, "the table is filled")
            assert counters()["table_bytes"] <= counters()["max_table_bytes"]
            assert counters()["index_bytes"]


def fill(client: Client, prefix: bytes, size_bytes: int, count: int) -> None:
    """Blocks in prompts of 16, as engines store them; some are read."""
    for begin in range(0, count, 2048):
        keys = [prefix + b"%011d" % number for number in range(begin, min(begin + 2048, count))]
        parents = [keys[number - 1] if number % 16 else None for number in range(len(keys))]
        client.put_batch(keys, [b"v" * size_bytes] * len(keys), parents=parents)
        client.get(keys[0])
