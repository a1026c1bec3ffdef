"""Masters whose user of etcd may do what docs/operations.md says such a user needs, and nothing else."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.docs.shell_blocks import ROOT, SHELL, code
from tests.etcd_server import EtcdServer, found
from tests.system.running import DEADLINE_S, STATUS_POLL_S, System, until
from tests.system.test_standby import LEASE

PAGE = ROOT / "docs" / "operations.md"
AS_ROOT = ["user add root:root", "role add root", "user grant-role root root"]


def guard(etcd: EtcdServer, tmp_path: Path) -> str:
    """Make the user that the page says, have the server ask who comes, and return the masters' catalog."""
    [script] = [block for block in code(PAGE, SHELL) if "role grant-permission" in block]
    commands = [*(f"etcdctl {command}" for command in AS_ROOT), script, "etcdctl auth enable"]
    path = f"{Path(found('etcdctl')).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
        env={**os.environ, "PATH": path, "ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": etcd.host_port},
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    password = tmp_path / "password"
    password.write_text("secret\n")
    return f"etcd://{etcd.host_port}?user=kvstore&password_file={password}"


def test_masters_work_with_the_documented_etcd_role(tmp_path: Path, etcd_server_factory: Callable[..., EtcdServer]) -> None:
    keys = [b"block-%d" % number for number in range(100)]
    with System(tmp_path, guard(etcd_server_factory(), tmp_path), masters=2) as system:
        masters = [system.start_master(index, "--partitions", "2", *LEASE, "--compact-interval-s", "1") for index in range(2)]
        system.start_node("n0", "--dram", "32MiB")
        until(lambda: owners(system) == 2, "each owns a partition", every_s=STATUS_POLL_S)
        system.await_alive("n0")
        with system.client() as client:
            assert all(client.put_batch(keys, keys))
            masters[0].kill()
            assert client.get_batch(keys) == keys
            assert client.put(b"after", b"value")
    assert not [line for line in system.logs if "permission denied" in line]


def owners(system: System) -> int:
    """Return the number of masters that own a partition, as the masters know each other."""
    return len({owner.name for owner in system.status().owners})
