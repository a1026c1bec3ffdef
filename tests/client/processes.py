"""Real daemons for tests: a master and nodes in processes of their own, on free ports, with folders of their own."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from tests.forked import Forked


class Process:
    """One daemon; `ready` is the JSON line that it printed when it began to serve."""

    def __init__(self, module: str, *flags: str, log: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        with log.open("ab") as errors:
            self._process = Forked(module, flags, environment=environment, stderr=errors)
        assert self._process.stdout is not None
        self.ready: dict[str, Any] = {}
        while self.ready.get("event") != "ready":
            line = self._process.stdout.readline()
            assert line, log.read_text()
            self.ready |= json.loads(line)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal and wait for the end: the exit status."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        status = self._process.wait(20)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status


class Cluster:
    """One master `memory:` and as many nodes as were started."""

    def __init__(self, folder: Path, *master_flags: str) -> None:
        self.folder = folder
        self._master_flags = master_flags
        self.nodes: list[Process] = []
        self.address = "127.0.0.1:0"
        self._control = "127.0.0.1:0"
        self.start_master()

    def start_master(self) -> None:
        """Start the master, after the first time at the addresses that it had."""
        self.master = Process(
            "tests.tuned_daemon",
            "kvstore-master",
            *("--listen", self.address, "--control", self._control, "--run-dir", str(self.folder / "m"), "--catalog", "memory:"),
            *("--node-ttl-s", "60", *self._master_flags),  # one that is stopped, or starved, is alive
            log=self.folder / "master.log",
        )
        self.address, self._control = self.master.ready["listen"], self.master.ready["control"]

    def control(self) -> Control:
        """The master's control plane; the caller closes it."""
        return Control(self._control, ClientSettings())

    def start_node(self, *flags: str) -> Process:
        self.nodes.append(self._start_node(len(self.nodes), "127.0.0.1:0", *flags))
        return self.nodes[-1]

    def restart_node(self, number: int, *flags: str) -> Process:
        """Start one that has ended, under its name and at its address."""
        self.nodes[number] = self._start_node(number, self.nodes[number].ready["listen"], *flags)
        return self.nodes[number]

    def _start_node(self, number: int, listen: str, *flags: str) -> Process:
        return Process(
            "tests.tuned_daemon",
            "kvstore-node",
            *("--master", self.address, "--listen", listen, "--name", f"n{number}"),
            *("--run-dir", str(self.folder / f"n{number}"), *flags),
            log=self.folder / f"node{number}.log",
        )

    def stop(self) -> None:
        for process in [*self.nodes, self.master]:
            with contextlib.suppress(ProcessLookupError):
                process.send(signal.SIGCONT)
            process.stop()


@contextlib.contextmanager
def cluster(folder: Path, *master_flags: str) -> Iterator[Cluster]:
    """A master without nodes; everything that was started is stopped at the end."""
    started = Cluster(folder, *master_flags)
    try:
        yield started
    finally:
        started.stop()
