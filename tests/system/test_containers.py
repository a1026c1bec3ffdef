"""Two containers on one machine: they share its kernel and boot id, and each has a network and a file system of its own, in which the
run folder has the same path. A connection to a path of the other container reaches the own daemon."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.namespaces import TwoHosts, two_hosts
from tests.store.daemons import running
from tests.system.far_client import FarClient
from tests.system.hosts import MASTER, master_flags, node_flags
from tests.system.test_engine_links import await_links

COUNT = 60


class Containers:
    """One on each of two hosts (network namespaces), each with a tmpfs of its own at `run_dir` and a node; the master is in the first."""

    def __init__(self, hosts: TwoHosts, folder: Path) -> None:
        self.hosts = hosts
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.master = f"{hosts.rails[0].addresses[0]}:{MASTER}"
        self._folder = folder
        self._inside = [self._begin(host) for host in (0, 1)]

    def _begin(self, host: int) -> list[str]:
        """A process that keeps the container's mounts: what a command line begins with, to run among them."""
        script = f"mount -t tmpfs run {self.run_dir} && echo mounted && exec sleep infinity"
        keeper = self.hosts.start(host, ["unshare", "-m", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "mounted\n"
        return ["nsenter", "-t", str(keeper.pid), "-m", f"--wdns={Path.cwd()}", "--"]

    @contextmanager
    def daemons(self) -> Iterator[None]:
        with ExitStack() as stack:
            flags = master_flags(self.hosts.rails[0].addresses[0], self.run_dir, control=self.hosts.rails[0].addresses[0])
            prefix = [*self.hosts.prefix(0), *self._inside[0]]
            stack.enter_context(running("master", *flags, "--slow-start-s", "0", log=self._folder / "master.log", prefix=prefix))
            for host, address in enumerate(self.hosts.rails[0].addresses):
                flags = node_flags(self.master, address, f"n{host}", self.run_dir)
                prefix = [*self.hosts.prefix(host), *self._inside[host]]
                log = self._folder / f"node{host}.log"
                node = stack.enter_context(running("node", *flags, "--dram", "32MiB", log=log, prefix=prefix))
                assert node.line()["event"] == "ready"
            yield

    def client(self, host: int) -> FarClient:
        """With the default transports, shared memory among them."""
        return FarClient(self.hosts, host, self.master, transports="auto", prefix=self._inside[host])


@pytest.mark.promise("right-daemon")
@pytest.mark.parametrize("size_bytes", [100, 128 << 10], ids=["in messages", "by the engine"])
def test_container_with_foreign_run_folder_finds_blocks(tmp_path: Path, size_bytes: int) -> None:
    keys = [[f"{host} {number}" for number in range(COUNT)] for host in (0, 1)]
    with two_hosts(0) as hosts:
        await_links(hosts, "rail0")
        containers = Containers(hosts, tmp_path)
        with containers.daemons(), containers.client(0) as first, containers.client(1) as second:
            for client, own in ((first, keys[0]), (second, keys[1])):
                assert client.put(own, size_bytes)["done"] == [True] * COUNT
            for client, others in ((first, keys[1]), (second, keys[0])):
                assert client.get(others, size_bytes)["done"] == [True] * COUNT
