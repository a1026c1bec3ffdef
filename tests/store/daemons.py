"""Real daemon processes for tests of the node: a master with its catalog in memory, and nodes, on free ports."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import ControlStub
from kvstore.testing.transfer.awaited import PATIENCE_S, eventually
from tests.forked import Forked

PROGRAMS = {
    "master": ("tests.tuned_daemon", "kvstore-master"),
    "node": ("tests.tuned_daemon", "kvstore-node"),
    "small-table node": ("tests.store.small_table_node", "kvstore-node"),
}
"""The module of each, and the daemon that it runs."""


def plain_environment() -> dict[str, str]:
    """Without settings of kvstore."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}


def start(kind: str, *flags: str, log: Path, prefix: Sequence[str] = ()) -> "subprocess.Popen[str]":
    with log.open("ab") as errors:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", *PROGRAMS[kind], *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=plain_environment(),
            text=True,
        )


class Daemon:
    """One running process. `facts` is its first line of standard output; `prefix` goes before its command line, or it runs on `host`, where
    the folders `hidden` are empty (tests/forked.py)."""

    def __init__(self, kind: str, *flags: str, log: Path, prefix: Sequence[str] = (), host: str = "", hidden: Sequence[str] = ()) -> None:
        self.log = log
        self.process: Forked | subprocess.Popen[str]
        if prefix:
            self.process = start(kind, *flags, log=log, prefix=prefix)
        else:
            with log.open("ab") as errors:
                module, daemon = PROGRAMS[kind]
                self.process = Forked(module, [daemon, *flags], environment=plain_environment(), stderr=errors, host=host, hidden=hidden)
        self.facts = self.line()

    def line(self) -> dict[str, Any]:
        """The next line of standard output."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        facts: dict[str, Any] = json.loads(line)
        return facts

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal and wait for the end; the exit code. Standard output has nothing left but "warm", which no test waits for."""
        self.process.send_signal(number)
        assert self.process.stdout is not None
        rest = self.process.stdout.read()
        code = self.process.wait(PATIENCE_S)
        assert [json.loads(line)["event"] for line in rest.splitlines()] in ([], ["warm"])
        return code


@contextmanager
def running(kind: str, *flags: str, log: Path, prefix: Sequence[str] = (), host: str = "", hidden: Sequence[str] = ()) -> Iterator[Daemon]:
    daemon = Daemon(kind, *flags, log=log, prefix=prefix, host=host, hidden=hidden)
    try:
        yield daemon
    finally:
        daemon.process.kill()
        daemon.process.wait(PATIENCE_S)
        assert daemon.process.stdout is not None
        daemon.process.stdout.close()


def master_flags(folder: Path, *, port: int = 0) -> list[str]:
    return ["--listen", f"127.0.0.1:{port}", "--control", "127.0.0.1:0", "--run-dir", str(folder / "m"), "--catalog", "memory:"]


def node_flags(folder: Path, master: str) -> list[str]:
    flags = ["--master", master, "--listen", "127.0.0.1:0", "--name", "n0", "--run-dir", str(folder / "n"), "--dram", "4MiB"]
    return [*flags, "--reconnect-interval-s", "0.02", "--reconnect-max-interval-s", "0.1"]


def status(master: Daemon) -> pb.StatusReply:
    with grpc.insecure_channel(master.facts["control"]) as control:
        reply: pb.StatusReply = ControlStub(control).Status(pb.StatusRequest(), timeout=PATIENCE_S)  # type: ignore[no-untyped-call]
        return reply


def until_nodes_are(master: Daemon, *states: str) -> pb.StatusReply:
    """The first status in which the nodes are in these states."""
    replies: list[pb.StatusReply] = []

    def are_so() -> bool:
        replies.append(status(master))
        return [node.state for node in replies[-1].nodes] == list(states)

    eventually(are_so, f"nodes that are {states}")
    return replies[-1]
