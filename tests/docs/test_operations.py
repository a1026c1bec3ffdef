"""The commands of docs/operations.md's answers run as they are printed, in their order, by bash, on a cluster as the page says."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import Client
from tests.client.processes import cluster
from tests.etcd_server import EtcdServer, found
from tests.shell import functions

pytestmark = pytest.mark.slow

ANSWERS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text().partition("## At three in the morning")[2]
SCRIPTS = {
    title: "".join(re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    for title, section in re.findall(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", ANSWERS.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of a shell on a cluster with the nodes n1 and n2, its catalog in an etcd of its own, and some blocks."""
    found("etcdctl")
    folder = tmp_path_factory.mktemp("c")
    etcd = EtcdServer(tmp_path_factory.mktemp("etcd"))
    etcd.start()
    try:
        with cluster(folder, "--catalog", f"etcd://{etcd.host_port}/answers") as started:
            for name in ("n1", "n2"):
                started.start_node("--name", name, "--dram", "16MiB", "--nvme", f"{folder / name}-nvme:16MiB")
            with Client(started.address) as client:
                client.put_batch([b"%d" % number for number in range(100)], [b"value"] * 100, namespace="answers", ack="cluster")
            yield {
                **os.environ,
                "KVSTORE_MASTER": started.address,
                "ETCDCTL_API": "3",
                "ETCDCTL_ENDPOINTS": etcd.host_port,
            }
    finally:
        etcd.remove()


@pytest.mark.promise("documented")
@pytest.mark.parametrize("question", SCRIPTS)
def test_the_commands_of_an_answer_run_as_printed(question: str, environment: dict[str, str], tmp_path: Path) -> None:
    with functions() as head:
        command = ["bash", "-euo", "pipefail", "-c", head + SCRIPTS[question]]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
