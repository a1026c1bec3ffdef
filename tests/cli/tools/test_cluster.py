"""Promises of cluster.py, with real daemons."""

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster, reachable
from kvstore.client import Client
from kvstore.protocol.errors import Broken, ConfigError
from kvstore.testing.transfer.awaited import eventually
from tests.client.embedded import SMALL, embedded
from tests.credentials import JOIN, OPERATOR, tokens_file
from tests.forked import Forked

HOLDER = """
import time
from kvstore.cli.tools.cluster import LocalCluster
from tests.client.embedded import SMALL, embedded
with LocalCluster(SMALL, on_log=lambda name, line: None) as cluster:
    print(cluster.master_pid, cluster.nodes[0].pid, flush=True)
    time.sleep(60)
"""


@contextmanager
def programs() -> Iterator[LocalCluster]:
    """A cluster whose daemons are real processes, started by `launched`."""
    with LocalCluster(SMALL, on_log=lambda name, line: None) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with embedded() as cluster:
        yield cluster


def start(plan: ClusterPlan) -> None:
    with LocalCluster(plan, on_log=lambda name, line: None, start=Forked):
        pass


def test_cluster_restarted_node_has_name_and_nvme_blocks(cluster: LocalCluster) -> None:
    values = {bytes([index]): bytes([index]) * 65_536 for index in range(128)}
    with Client(cluster.address) as client:
        client.put_batch(list(values), list(values.values()))
        on_nvme = [key for key, at in zip(values, client.locate(list(values)), strict=True) if at and "nvme" in at[0].tiers]
        cluster.kill_node(0)
        cluster.restart_node(0)
        cluster.wait_ready()
        assert on_nvme
        assert client.get_batch(on_nvme) == [values[key] for key in on_nvme]
    with cluster.control() as control:
        assert [node.name for node in control.status().nodes] == ["node-0"]
    cluster.check()


def test_a_daemon_that_dies_is_named_with_the_reason(cluster: LocalCluster) -> None:
    pid = cluster.nodes[0].pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Broken, match=rf"node-0 \(pid {pid}\) was killed by SIGKILL"):
        cluster.wait_for_end()
    os.kill(cluster.master_pid, signal.SIGKILL)
    with pytest.raises(Broken, match="master"):
        cluster.wait_for_end()
    cluster.check()  # each death is reported once


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The path of a Unix socket has 107 bytes at most, which pytest's folders may exceed."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_nothing_is_left_afterwards(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    with programs() as cluster:
        pids = [cluster.master_pid, *(node.pid for node in cluster.nodes)]
        assert list(short_folder.iterdir())
    assert not list(short_folder.iterdir())
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_several_nodes_share_an_nvme_folder_without_meeting(tmp_path: Path) -> None:
    plan = ClusterPlan(dram="1MiB", nvme=f"{tmp_path / 'nvme'}:8MiB", nodes=2, is_private=True)
    progress: list[tuple[int, int]] = []
    with LocalCluster(plan, on_log=lambda name, line: None, start=Forked) as cluster:
        cluster.wait_warm(lambda done, whole: progress.append((done, whole)))
        with cluster.control() as control:
            assert sorted(node.name for node in control.status().nodes) == ["node-0", "node-1"]
    assert sorted(path.name for path in (tmp_path / "nvme").iterdir()) == ["node-0", "node-1"]
    assert all(0 <= done <= whole for done, whole in progress)


def test_nodes_have_the_room_for_their_tables_that_the_plan_says() -> None:
    with embedded(ClusterPlan(dram="64MiB", table_share="4", is_private=True)) as cluster, cluster.control() as control:
        eventually(lambda: control.status().nodes[0].counters["max_table_bytes"] == 256 << 20, "the node has told the master")


def test_private_cluster_ignores_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_NODE_NVME", "/no/such/folder:1MiB")
    monkeypatch.setenv("KVSTORE_MASTER_LISTEN", "nonsense")
    with embedded():
        pass


def test_cluster_control_uses_own_credentials(tmp_path: Path) -> None:
    tokens, config = tokens_file(tmp_path), tmp_path / "kvstore.toml"
    config.write_text(f"""[master]
tokens = "{tokens}"
run_dir = "{tmp_path}/m"
[node]
join_token = "{JOIN}"
run_dir = "{tmp_path}/n"
[client]
token = "{OPERATOR}"
""")
    plan = ClusterPlan(listen="127.0.0.1:0", dram="4MiB", config=str(config))
    with LocalCluster(plan, on_log=lambda name, line: None, start=Forked) as cluster:
        cluster.wait_ready()
        with cluster.control() as control:
            assert [tier.name for tier in control.status().nodes[0].tiers] == ["dram"]


def test_a_port_in_use_is_told(cluster: LocalCluster) -> None:
    with pytest.raises(ConfigError, match=r"master: "):
        start(ClusterPlan(listen=cluster.address, is_private=True))


def test_reachable_replaces_wildcard_addresses() -> None:
    assert reachable("127.0.0.1:7") == "127.0.0.1:7"
    host, _, port = reachable("0.0.0.0:7").rpartition(":")
    assert port == "7"
    assert host not in ("0.0.0.0", "")
    assert reachable("[::]:7") in (f"{host}:7", "[::1]:7")


def test_cluster_daemons_end_with_killed_program(short_folder: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(short_folder)}
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, env=environment, text=True)
    assert holder.stdout is not None
    with holder.stdout:
        pids = [int(pid) for pid in holder.stdout.readline().split()]
        assert len(pids) == 2
        handles = [os.pidfd_open(pid) for pid in pids]
        holder.kill()
        holder.wait(10)
    for handle in handles:
        assert has_ended(handle)
        os.close(handle)


def has_ended(handle: int) -> bool:
    """Wait until the process of a pidfd has ended."""
    return bool(select.select([handle], [], [], 15)[0])
