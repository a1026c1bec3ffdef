"""A whole cluster of this machine for one program: a master and its nodes, each a process of its own.

It ends with the program, whatever ends that. The daemons are started by their modules' names and told by flags; what is not given here
they take from their own settings (`KVSTORE_*`, the TOML file).
"""

import contextlib
import os
import queue
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from kvstore.cli.tools.child import Child, OnLog, ProcessHandle, launched
from kvstore.client.config import SECTION, ClientSettings
from kvstore.client.control import Control
from kvstore.protocol.errors import ConfigError, DeadlineExceeded, KVStoreError
from kvstore.protocol.settings import load_settings
from kvstore.rpc.address import Address
from kvstore.rpc.deadline import Deadline

START_DEADLINE_S: Final = 30.0
"""For a daemon to listen; what it recovers from NVMe is read before."""
STALL_DEADLINE_S: Final = 60.0
NODE_DIED: Final = "[node_died "
"""In the log of a master that is told to stop behind its nodes: nothing to tell anybody of."""
"""For a sign of progress of a daemon that listens. A node registers within seconds and reports each second what memory it touched."""
PROGRESS_INTERVAL_S: Final = 0.25
MAX_NODES: Final = 64
WILDCARDS: Final = ("0.0.0.0", "[::]")
LONG_DEMOTION_WAIT_S: Final = "60"
"""`demotion_wait_s` that drops no block, however slow the disk is: DRAM of a few MiB has no room for a burst."""

OnProgress = Callable[[int, int], None]
"""Called with bytes of DRAM touched so far, and to be touched."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What to start. Texts as in the daemons' flags, "" for what they take from their own settings. Sizes are those of each node."""

    listen: str = ""
    memory: str = ""
    dram: str = ""
    nvme: str = ""
    """DIR:SIZE; with more than one node each has DIR/NAME. For a private cluster SIZE alone will do: in a temporary folder."""
    hbm: str = ""
    nodes: int = 1
    catalog: str = ""
    policy: str = ""
    table_share: str = ""
    demotion_wait_s: str = ""
    config: str = ""
    is_private: bool = False
    """For this program alone: on free ports of the loopback, sockets in a temporary folder, KVSTORE_* variables ignored."""


class LocalCluster:
    """A context manager: running and known to the master inside, gone afterwards. Used by the thread that starts it, which must
    live as long: a child is ended when the thread that started it is."""

    def __init__(self, plan: ClusterPlan, *, on_log: OnLog, start: Callable[..., ProcessHandle] = launched) -> None:
        """Raises ConfigError for a number of nodes outside [1, MAX_NODES]. `on_log` is called in other threads, `start` as a Child's."""
        if not 1 <= plan.nodes <= MAX_NODES:
            raise ConfigError(f"nodes is {plan.nodes}: an embedded cluster has 1 to {MAX_NODES}")
        self._plan = plan
        self._tell_log = on_log
        self._is_closing = False
        self._start_process = start
        self._ended: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._expected: set[Child] = set()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._master: Child | None = None
        self.nodes: list[Child] = []
        self.address = ""
        """Where clients connect."""
        self.control_address = ""
        """The master's control plane, gRPC."""
        self.console_address = ""
        """The console's, for a browser; "" for none."""

    def __enter__(self) -> "LocalCluster":
        """Start the daemons until they listen. Raises ConfigError or Broken with a daemon's own words; nothing is left running."""
        try:
            if self._plan.is_private:
                self._folder = tempfile.TemporaryDirectory(prefix="kvstore-")
            self._master = self._start("master", "kvstore.master.daemon", self._master_arguments())
            facts = self._master.facts("ready", deadline_s=START_DEADLINE_S)
            self.address, self.control_address, self.console_address = reachable(facts["listen"]), facts["control"], facts["console"]
            for index in range(self._plan.nodes):
                self.nodes.append(self._start_node(index))
            for node in self.nodes:
                node.facts("serving", deadline_s=START_DEADLINE_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def master_pid(self) -> int:
        assert self._master is not None
        return self._master.pid

    def control(self) -> Control:
        """The master's control plane; the caller closes it. Who this program is there, its own settings say."""
        if self._plan.is_private:
            return Control(self.control_address, ClientSettings())
        return Control(self.control_address, load_settings(ClientSettings, SECTION, flags={}, config=self._plan.config or None))

    def wait_ready(self) -> None:
        """Wait until the master knows all nodes: clients can put and get. Their DRAM is still being touched. Raises as `check`, and
        DeadlineExceeded when a node takes longer than STALL_DEADLINE_S."""
        deadline = Deadline(STALL_DEADLINE_S)
        for node in self.nodes:
            while not _has_said(node, "ready"):
                self.check()
                if deadline.left_s() <= 0:
                    raise DeadlineExceeded(f"{node.name} is not ready after {STALL_DEADLINE_S:g} s")

    def wait_warm(self, on_progress: OnProgress = lambda done, whole: None) -> None:
        """Wait until all DRAM has been touched as well, however long that takes: first writes are as fast as they will be. Raises as
        `check`, and DeadlineExceeded when nothing happens for STALL_DEADLINE_S."""
        self.wait_ready()
        done_bytes, since_s = -1, time.monotonic()
        with self.control() as control:
            for node in self.nodes:
                while not _has_said(node, "warm"):
                    self.check()
                    touched_bytes, whole_bytes = _dram_touched(control)
                    on_progress(touched_bytes, whole_bytes)
                    if touched_bytes > done_bytes:
                        done_bytes, since_s = touched_bytes, time.monotonic()
                    if time.monotonic() - since_s > STALL_DEADLINE_S:
                        raise DeadlineExceeded(f"no DRAM of {node.name} was touched for {STALL_DEADLINE_S:g} s, and some is left")

    def wait_for_end(self) -> None:
        """Wait until a daemon ends by itself, and raise why: ConfigError or Broken."""
        while True:
            # In short waits: a signal that comes just before a wait begins is not noticed by Python until that wait is over.
            with contextlib.suppress(queue.Empty):
                raise self._ended.get(timeout=PROGRESS_INTERVAL_S).failure()

    def check(self, *, wait_s: float = 0.0) -> None:
        """Raises ConfigError or Broken when a daemon has ended by itself, or does within `wait_s`."""
        with contextlib.suppress(queue.Empty):
            raise self._ended.get(timeout=wait_s).failure()

    def kill_node(self, index: int) -> None:
        """SIGKILL, as a crash would be."""
        self._expected.add(self.nodes[index])
        self.nodes[index].kill()

    def restart_node(self, index: int) -> None:
        """Start a node that was killed, with the same name and tiers, until it listens. Raises as `__enter__`; see `wait_ready`."""
        self.nodes[index] = self._start_node(index)
        self.nodes[index].facts("serving", deadline_s=START_DEADLINE_S)

    def close(self) -> None:
        """Stop the nodes, all at once, then the master; SIGKILL for one that takes too long. A second close is a no-op."""
        self._is_closing = True
        self._expected.update(self.nodes)
        for node in self.nodes:
            node.ask_to_stop()
        for node in self.nodes:
            node.stop()
        if self._master is not None:
            self._expected.add(self._master)
            self._master.stop()
        self.nodes, self._master = [], None
        if self._folder is not None:
            self._folder.cleanup()

    def _on_log(self, name: str, line: str) -> None:
        if not (self._is_closing and NODE_DIED in line):
            self._tell_log(name, line)

    def _start_node(self, index: int) -> Child:
        name = f"node-{index}"
        return self._start(name, "kvstore.store.daemon", self._node_arguments(name))

    def _start(self, name: str, module: str, arguments: Sequence[str]) -> Child:
        def on_end(child: Child) -> None:
            if child not in self._expected:
                self._ended.put(child)

        return Child(
            name, module, arguments, environment=self._environment(), on_log=self._on_log, on_end=on_end, start=self._start_process
        )

    def _environment(self) -> dict[str, str]:
        """A private cluster is what its plan says: it must not, say, take the NVMe folder of this machine's real node."""
        return {name: value for name, value in os.environ.items() if not (self._plan.is_private and name.startswith("KVSTORE_"))}

    def _master_arguments(self) -> list[str]:
        plan = self._plan
        listen = plan.listen or ("127.0.0.1:0" if plan.is_private else "")
        return _flags(listen=listen, catalog=plan.catalog, config=plan.config, run_dir=self._run_dir())

    def _node_arguments(self, name: str) -> list[str]:
        plan = self._plan
        return _flags(
            name=name,
            master=self.address,
            listen=f"{self.address.rpartition(':')[0]}:0",
            memory=plan.memory,
            dram=plan.dram,
            nvme=self._nvme(name),
            hbm=plan.hbm,
            policy=plan.policy,
            table_share=plan.table_share,
            demotion_wait_s=plan.demotion_wait_s,
            config=plan.config,
            run_dir=self._run_dir(),
            drain_s="0" if self._is_nvme_temporary else "",  # nobody finds there what it would write down
        )

    @property
    def _is_nvme_temporary(self) -> bool:
        return self._folder is not None and bool(self._plan.nvme) and ":" not in self._plan.nvme

    def _run_dir(self) -> str:
        return self._folder.name if self._folder is not None else ""

    def _nvme(self, name: str) -> str:
        folder, _colon, size = self._plan.nvme.rpartition(":")
        if self._is_nvme_temporary and self._folder is not None:
            folder = str(Path(self._folder.name, "nvme"))
        elif not folder or self._plan.nodes == 1:
            return self._plan.nvme
        with contextlib.suppress(OSError):  # the node says what is wrong with it
            os.mkdir(folder, 0o700)
        return f"{Path(folder, name)}:{size}"


def _has_said(node: Child, event: str) -> bool:
    """Whether the node has, or does within PROGRESS_INTERVAL_S."""
    try:
        node.facts(event, deadline_s=PROGRESS_INTERVAL_S)
    except DeadlineExceeded:
        return False
    return True


def _dram_touched(control: Control) -> tuple[int, int]:
    """Bytes of DRAM touched, and of all DRAM. The master may not know the nodes yet, or be too busy to say."""
    try:
        tiers = [tier for node in control.status().nodes for tier in node.tiers if tier.name == "dram"]
    except KVStoreError:
        return 0, 0
    return sum(tier.prefaulted_bytes for tier in tiers), sum(tier.capacity_bytes for tier in tiers)


def reachable(address: str) -> str:
    """`address` as others reach it: for one on all interfaces, with the host that this machine sends from, else its loopback."""
    host, _, port = address.rpartition(":")
    if host not in WILDCARDS:
        return address
    sends_from = _sends_from(socket.AF_INET, "192.0.2.1")
    if host == "[::]":
        sends_from = sends_from or _sends_from(socket.AF_INET6, "2001:db8::1") or "::1"
    return str(Address(sends_from or "127.0.0.1", int(port)))


def _sends_from(family: socket.AddressFamily, documentation: str) -> str:
    """The address from which this machine sends to the world; "" where it cannot. `documentation` is an address of nobody (RFC 5737, RFC
    3849), to which nothing is sent, so that the default route decides."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((documentation, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _flags(**values: str) -> list[str]:
    """`--name=value` of those that are given. In one word: a value may begin with a dash."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value]
