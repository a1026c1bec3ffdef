"""Backup under a running master, and restore, as docs/recovery.md has them: a snapshot of etcd, a copy of LMDB's folder.

The owner changed since the backup. So running nodes refuse the restored one, whose epoch is lower, until they are started again.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvstore.client.control import Control
from tests.etcd_server import EtcdServer, found
from tests.system.running import DEADLINE_S, System, until

PAGE = (Path(__file__).parents[2] / "docs" / "recovery.md").read_text()
KEYS = [b"block-%d" % number for number in range(50)]
DEFERRED = [b"later-%d" % number for number in range(50)]


def etcdctl(*arguments: str, endpoint: str = "") -> None:
    environment = os.environ | {"ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": endpoint}
    subprocess.run([found("etcdctl"), *arguments], check=True, env=environment, capture_output=True)


def fill(system: System) -> None:
    """Before the backup: blocks in DRAM and on NVMe, a quota, a pin."""
    system.start_node("n0", "--dram", "16MiB", "--nvme", f"{system.folder / 'nvme'}:64MiB", "--drain-s", "60")
    with system.client() as client:
        client.put_batch(KEYS, [b"x" * 100] * len(KEYS), namespace="kept")
        client.pin(KEYS[:1])
    with control(system) as asked:
        asked.set_quota("red", {"pins": 7})


def change(system: System) -> None:
    """After it: what the backup does not have."""
    with system.client() as client:
        client.put_batch(DEFERRED, [b"y" * 100] * len(DEFERRED), namespace="kept")
        client.remove(KEYS[-1:])
    with control(system) as asked:
        asked.set_quota("red", {"pins": 9})


def control(system: System) -> Control:
    return Control.find(system.settings)


def check(system: System) -> None:
    """All blocks of nodes are found, later ones too; what operators set is that of the backup; and the cluster takes puts."""
    assert system.nodes["n0"].stop(DEADLINE_S)
    system.start_node("n0")
    until(lambda: [node.state for node in system.status().nodes] == ["alive"], "the node registers with the restored catalog")
    status = system.status()
    assert status.quotas.tenants["red"].pins == 7
    assert status.pinned == 1
    with system.client() as client:
        until(lambda: all(value is not None for value in client.get_batch([*KEYS[:-1], *DEFERRED])), "blocks are found")
        client.put(b"new", b"z")
        assert client.get(b"new") == b"z"


def test_the_page_has_the_commands_that_are_tried_here() -> None:
    commands = (
        "etcdctl snapshot save /backup/kvstore.db",
        "etcdctl snapshot restore /backup/kvstore.db",
        "python -m lmdb copy -e /var/lib/kvstore/catalog",
    )
    assert all(command in PAGE for command in commands)


def test_a_snapshot_of_etcd_is_restored_while_nodes_run(tmp_path: Path, etcd_server_factory: Callable[..., EtcdServer]) -> None:
    etcd = etcd_server_factory()
    snapshot, data = tmp_path / "snapshot.db", etcd._folder / "data"
    with System(tmp_path, f"etcd://{etcd.host_port}") as system:
        system.start_master()
        fill(system)
        etcdctl("snapshot", "save", str(snapshot), endpoint=etcd.host_port)
        for _ in range(3):
            system.masters[0].kill()
            system.start_master()
        change(system)
        etcd.kill()
        shutil.rmtree(data)
        system.masters[0].kill()
        cluster = [flag for flag in etcd._command if flag.startswith(("--initial-cluster=", "--initial-advertise-peer-urls="))]
        etcdctl("snapshot", "restore", str(snapshot), f"--data-dir={data}", "--name=only", *cluster)
        etcd.start()
        system.start_master()
        check(system)


def test_a_copy_of_lmdb_is_restored_while_nodes_run(tmp_path: Path) -> None:
    folder, copy = tmp_path / "catalog", tmp_path / "copy"
    with System(tmp_path, f"lmdb:{folder}") as system:
        system.start_master()
        fill(system)
        command = [sys.executable, "-m", "lmdb", "copy", "-e", str(folder), str(copy)]
        subprocess.run(command, check=True, capture_output=True)
        for _ in range(3):
            system.masters[0].kill()
            system.start_master()
        change(system)
        system.masters[0].kill()
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        system.start_master()
        check(system)
