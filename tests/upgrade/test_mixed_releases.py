"""A cluster is upgraded daemon by daemon: each mixture of this release and the one before gives clients of both the bytes that were put."""

import itertools
import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.upgrade.former_release import NO_RELEASE, ROOT, last_tag, start, tree

CLIENT = str(ROOT / "tests" / "upgrade" / "client_child.py")
END_S = 60
NOW, FORMER = "this release", "the release before"


class Daemons:
    """A master and its nodes, each of the release that was asked for; all are ended with the test."""

    def __init__(self, folder: Path, tag: str) -> None:
        """`tag` is that of the release before."""
        self._folder = folder
        self._tag = tag
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._port, self._control = free_ports(2)
        self.address = f"127.0.0.1:{self._port}"

    def start_master(self, release: str) -> None:
        flags = ("--listen", self.address, "--control", f"127.0.0.1:{self._control}", "--catalog", f"lmdb:{self._folder / 'catalog'}")
        self._start("master", release, "kvstore.master.daemon", *flags)

    def start_masters(self, names: Sequence[str], catalog: str) -> None:
        """Of this release, one after the other: the first owns the catalog. Clients are given the last one first."""
        ports = free_ports(len(names))
        for name, port in zip(names, ports, strict=True):
            where = ("--listen", f"127.0.0.1:{port}", "--control", "127.0.0.1:0")
            self._start(name, NOW, "kvstore.master.daemon", *where, "--catalog", catalog)
        self.address = ",".join(f"127.0.0.1:{port}" for port in reversed(ports))

    def start_node(self, name: str, release: str, *flags: str) -> None:
        where = ("--listen", "127.0.0.1:0", "--master", self.address, "--name", name, "--dram", "64MiB")
        self._start(name, release, "kvstore.store.daemon", *where, *flags)

    def _start(self, name: str, release: str, module: str, *flags: str) -> None:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        found = start(self._tree(release), "-m", module, "--run-dir", str(folder), *flags, log=self._folder / f"{name}.log")
        self._running[name] = found
        assert found.stdout is not None
        while True:
            line = found.stdout.readline()
            assert line, (self._folder / f"{name}.log").read_text()
            if json.loads(line)["event"] == "ready":
                return

    def stop(self, name: str) -> None:
        daemon = self._running.pop(name)
        daemon.send_signal(signal.SIGTERM)
        with daemon:  # which waits for it, and closes what it was heard by
            daemon.wait(END_S)

    def client(self, release: str, name: str, *earlier: str) -> None:
        """Puts its own values and gets those of the clients before it."""
        log = self._folder / "client.log"
        found = start(self._tree(release), CLIENT, self.address, name, *earlier, log=log)
        out, _ = found.communicate(timeout=2 * END_S)
        assert out == "done\n", log.read_text()

    def _tree(self, release: str) -> Path | None:
        return tree(self._tag) if release == FORMER else None

    def close(self) -> None:
        for name in list(self._running):
            with self._running.pop(name) as daemon:
                daemon.kill()


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    tag = last_tag()
    if tag is None:
        pytest.skip(NO_RELEASE)
    started = Daemons(tmp_path, tag)
    yield started
    started.close()


@pytest.mark.parametrize(("master", "node", "other"), [m for m in itertools.product((NOW, FORMER), repeat=3) if len(set(m)) > 1])
def test_clients_of_both_releases_share_blocks(daemons: Daemons, master: str, node: str, other: str) -> None:
    daemons.start_master(master)
    daemons.start_node("one", node)
    daemons.client(FORMER, "a")
    daemons.start_node("two", other)
    daemons.client(NOW, "b", "a")
    daemons.client(FORMER, "c", "a", "b")
    daemons.client(NOW, "d", "a", "b", "c")


def test_master_upgrade_under_load_loses_nothing(daemons: Daemons) -> None:
    daemons.start_master(FORMER)
    daemons.start_node("one", FORMER)
    daemons.start_node("two", FORMER)
    daemons.client(FORMER, "a")
    daemons.stop("master")
    daemons.start_master(NOW)
    daemons.client(FORMER, "b", "a")
    daemons.client(NOW, "c", "a", "b")


def test_old_nodes_and_clients_bypass_a_standby_master(daemons: Daemons, etcd_url: str) -> None:
    daemons.start_masters(["owner", "standby"], etcd_url)
    daemons.start_node("one", FORMER)
    daemons.client(FORMER, "a")
    daemons.start_node("two", NOW)
    daemons.client(NOW, "b", "a")
    daemons.client(FORMER, "c", "a", "b")
