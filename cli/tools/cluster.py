"""Local cluster for one program: a master and its nodes as child processes.

The cluster ends with the program, even if that is killed. Daemons get their settings by flags; settings that are not given come from
`KVSTORE_*` variables and the TOML file.
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
"""For a daemon to listen; a node reads its NVMe records before."""
STALL_DEADLINE_S: Final = 60.0
"""Without progress of a daemon that listens. A node registers within seconds and reports each second how much memory it has touched."""
NODE_DIED: Final = "[node_died "
"""Event in the master's log that is expected, and dropped, while the cluster is stopped."""
PROGRESS_INTERVAL_S: Final = 0.25
MAX_NODES: Final = 64
WILDCARDS: Final = ("0.0.0.0", "[::]")
LONG_DEMOTION_WAIT_S: Final = "60"
"""`demotion_wait_s` long enough that no block is dropped on a slow disk: a DRAM tier of a few MiB cannot absorb a burst."""

OnProgress = Callable[[int, int], None]
"""Called with the bytes of DRAM touched so far, and the total."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Flags of the daemons to start; "" leaves a setting to its other sources. Sizes are per node."""

    listen: str = ""
    memory: str = ""
    dram: str = ""
    nvme: str = ""
    """DIR:SIZE; with several nodes each uses DIR/NAME. A private cluster may give SIZE alone, for a temporary folder."""
    hbm: str = ""
    nodes: int = 1
    catalog: str = ""
    policy: str = ""
    table_share: str = ""
    demotion_wait_s: str = ""
    config: str = ""
    is_private: bool = False
    """Use free loopback ports and a temporary folder for sockets, and ignore KVSTORE_* variables."""


class LocalCluster:
    """Context manager that starts the daemons and stops them on exit. For one thread, which must outlive the cluster (see Child)."""

    def __init__(self, plan: ClusterPlan, *, on_log: OnLog, start: Callable[..., ProcessHandle] = launched) -> None:
        """Raises ConfigError for a number of nodes outside [1, MAX_NODES]. `on_log` is called in other threads; `start` as for Child."""
        if not 1 <= plan.nodes <= MAX_NODES:
            raise ConfigError(f"nodes is {plan.nodes}: a local cluster has 1 to {MAX_NODES}")
        self._plan = plan
        self._forward_log = on_log
        self._is_closing = False
        self._start_process = start
        self._ended: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._expected: set[Child] = set()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._master: Child | None = None
        self.nodes: list[Child] = []
        self.address = ""
        """For clients."""
        self.control_address = ""
        """Of the master's control plane (gRPC)."""
        self.console_address = ""
        """URL of the console; "" for none."""

    def __enter__(self) -> "LocalCluster":
        """Start the daemons and wait until they listen. Raises ConfigError or Broken with the daemon's error, after stopping all."""
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
        """Connect to the master's control plane with this program's credentials. The caller closes it."""
        if self._plan.is_private:
            return Control(self.control_address, ClientSettings())
        return Control(self.control_address, load_settings(ClientSettings, SECTION, flags={}, config=self._plan.config or None))

    def wait_ready(self) -> None:
        """Wait until all nodes have registered, so that clients can put and get. Their DRAM may still be being touched.

        Raises as `check`, and DeadlineExceeded after STALL_DEADLINE_S.
        """
        deadline = Deadline(STALL_DEADLINE_S)
        for node in self.nodes:
            while not _has_event(node, "ready"):
                self.check()
                if deadline.left_s() <= 0:
                    raise DeadlineExceeded(f"{node.name} is not ready after {STALL_DEADLINE_S:g} s")

    def wait_warm(self, on_progress: OnProgress = lambda done, whole: None) -> None:
        """Wait until all DRAM has been touched, so that first writes are not slowed by page faults.

        Raises as `check`, and DeadlineExceeded after STALL_DEADLINE_S without progress.
        """
        self.wait_ready()
        done_bytes, since_s = -1, time.monotonic()
        with self.control() as control:
            for node in self.nodes:
                while not _has_event(node, "warm"):
                    self.check()
                    touched_bytes, whole_bytes = _dram_touched(control)
                    on_progress(touched_bytes, whole_bytes)
                    if touched_bytes > done_bytes:
                        done_bytes, since_s = touched_bytes, time.monotonic()
                    if time.monotonic() - since_s > STALL_DEADLINE_S:
                        raise DeadlineExceeded(f"{node.name} has touched no DRAM for {STALL_DEADLINE_S:g} s, and some is left")

    def wait_for_end(self) -> None:
        """Wait until a daemon exits unexpectedly, and raise the cause: ConfigError or Broken."""
        while True:
            # Short waits: Python handles a signal that arrives just before a wait begins only after that wait.
            with contextlib.suppress(queue.Empty):
                raise self._ended.get(timeout=PROGRESS_INTERVAL_S).failure()

    def check(self, *, wait_s: float = 0.0) -> None:
        """Raise ConfigError or Broken if a daemon has exited unexpectedly, or does within `wait_s`."""
        with contextlib.suppress(queue.Empty):
            raise self._ended.get(timeout=wait_s).failure()

    def kill_node(self, index: int) -> None:
        """Kill a node with SIGKILL, as a simulated crash."""
        self._expected.add(self.nodes[index])
        self.nodes[index].kill()

    def restart_node(self, index: int) -> None:
        """Start a killed node again with the same name and tiers, and wait until it listens. Raises as `__enter__`; see `wait_ready`."""
        self.nodes[index] = self._start_node(index)
        self.nodes[index].facts("serving", deadline_s=START_DEADLINE_S)

    def close(self) -> None:
        """Stop the nodes in parallel, then the master, with SIGKILL after a deadline. Idempotent."""
        self._is_closing = True
        self._expected.update(self.nodes)
        for node in self.nodes:
            node.terminate()
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
            self._forward_log(name, line)

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
        """Environment of the daemons. A private cluster ignores KVSTORE_*: it must not use, say, the NVMe folder of a real node."""
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
            drain_s="0" if self._is_nvme_temporary else "",  # saved blocks would be deleted with the folder
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
        with contextlib.suppress(OSError):  # the node reports the error
            os.mkdir(folder, 0o700)
        return f"{Path(folder, name)}:{size}"


def _has_event(node: Child, event: str) -> bool:
    """Return whether the node has reported the event, or does within PROGRESS_INTERVAL_S."""
    try:
        node.facts(event, deadline_s=PROGRESS_INTERVAL_S)
    except DeadlineExceeded:
        return False
    return True


def _dram_touched(control: Control) -> tuple[int, int]:
    """Bytes of DRAM touched, and of all DRAM; zeros while the master does not respond."""
    try:
        tiers = [tier for node in control.status().nodes for tier in node.tiers if tier.name == "dram"]
    except KVStoreError:
        return 0, 0
    return sum(tier.prefaulted_bytes for tier in tiers), sum(tier.capacity_bytes for tier in tiers)


def reachable(address: str) -> str:
    """Replace a wildcard host by this machine's source address, or by loopback if it has no route. Other addresses are unchanged."""
    host, _, port = address.rpartition(":")
    if host not in WILDCARDS:
        return address
    source = _source_address(socket.AF_INET, "192.0.2.1")
    if host == "[::]":
        source = source or _source_address(socket.AF_INET6, "2001:db8::1") or "::1"
    return str(Address(source or "127.0.0.1", int(port)))


def _source_address(family: socket.AddressFamily, documentation: str) -> str:
    """Source address of the default route; "" without one.

    `documentation` is a reserved address (RFC 5737, RFC 3849). Connecting a UDP socket sends no packet.
    """
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((documentation, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _flags(**values: str) -> list[str]:
    """Return `--name=value` for non-empty values; one word each, because a value may begin with a dash."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value]
