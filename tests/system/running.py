"""A system of real processes for these tests: masters and nodes on ports and in folders that outlive a kill, so that each comes back
where it was. Every wait has a deadline."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import pytest

from kvstore.cli.tools.child import Child, launched
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, cluster_status
from kvstore.client.local.nodes import PROBE_NS
from kvstore.client.sync import Client
from kvstore.master.leadership.partition_assigner import shares
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import KVStoreError
from tests.credentials import JOIN
from tests.forked import FORKABLE, Forked
from tests.ports import free_ports

DEADLINE_S: Final = 120.0
PATIENT_S: Final = 60.0
"""The deadline of a call that has no other."""
POLL_S: Final = 0.01
STATUS_POLL_S: Final = 0.03
"""Poll interval when each poll is a connection to the master and a control-plane call."""
SHARES_POLL_S: Final = 0.2
"""Poll interval when each poll asks several masters about each partition."""
PROCESS_POLL_S: Final = 0.1
"""Poll interval when each poll starts a process."""
MAX_POLL_S: Final = 0.25
"""Poll interval of long waits, to save processor time."""
MIB: Final = 1 << 20
_MAKING: Final = threading.RLock()
"""Held while a client is made: where it is it learns of a module, in which two threads would put back what the other has exchanged."""


def until(
    is_so: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S, *, every_s: float = POLL_S, max_every_s: float = MAX_POLL_S
) -> None:
    """Wait until the condition holds; fails, naming `what` was awaited, when it does not in time. Polls ever more rarely, late by at
    most a tenth. `max_every_s` is 0 where the polls themselves bring the condition about."""
    began_s = time.monotonic()
    while not is_so():
        waited_s = time.monotonic() - began_s
        assert waited_s < deadline_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(max(every_s, min(max_every_s, waited_s / 10)))


class System:
    """Masters and nodes by name. A context manager: what was started is gone at the end."""

    def __init__(self, folder: Path, catalog: str = "memory:", *, masters: int = 1) -> None:
        """`folder` exists. Nothing is started yet."""
        self.folder = folder
        self.catalog = catalog
        ports = free_ports(2 * masters)
        self._master_ports = list(zip(ports[::2], ports[1::2], strict=True))
        self._node_ports: dict[str, int] = {}
        self._node_flags: dict[str, tuple[str, ...]] = {}
        self.masters: dict[int, Child] = {}
        self.nodes: dict[str, Child] = {}
        self.logs: list[str] = []
        self.node_module = "tests.tuned_daemon"
        """Module that runs as a node; tests of broken devices use a node with one."""
        self.master_module = "tests.tuned_daemon"
        self.environments: dict[str, dict[str, str]] = {}
        """By the name of a daemon (n0, master-0), what its environment has beside that of the tests."""
        self.settings = ClientSettings(master=self.address, deadline_s=30.0)
        """Of questions to the control plane; a test with tokens gives it an operator's."""
        self._control: Control | None = None
        """Of the only master since it was started last: to find it and to connect takes four times as much as a status."""

    def __enter__(self) -> "System":
        return self

    def __exit__(self, *_: object) -> None:
        self._forget_control()
        for child in [*self.nodes.values(), *self.masters.values()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGCONT)
            child.kill()

    @property
    def address(self) -> str:
        """Of every master, as clients and nodes name them."""
        return ",".join(f"127.0.0.1:{listen}" for listen, _ in self._master_ports)

    def client(self, *, ack: str = "cluster", settings: ClientSettings | None = None, **options: Any) -> Client:
        """Return a client; the caller closes it.

        By default its puts are in the directory when they return, and its deadlines suit a busy machine."""
        with _MAKING:
            own = {name: options.pop(name) for name in ("tenant", "token") if name in options}
            deadline_s = options.pop("deadline_s", PATIENT_S)
            chosen = replace(settings or ClientSettings(), master=self.address, ack=ack, deadline_s=deadline_s, is_loaded=True, **own)
            return Client(settings=chosen, **options)

    def remote_client(self, **options: Any) -> Client:
        """One that takes itself to be on another host: it uses TCP, and no node is the local one. The caller closes it."""
        with _MAKING, pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvstore.client.operations.is_local_socket", lambda unix, host_id: False)
            return self.client(**options)

    def start_master(self, index: int = 0, *flags: str) -> Child:
        self._forget_control()
        listen, control = self._master_ports[index]
        self.masters[index] = self._start(
            f"master-{index}",
            self.master_module,
            "kvstore-master",
            *("--listen", f"127.0.0.1:{listen}", "--control", f"127.0.0.1:{control}", "--run-dir", str(self.folder / f"m{index}")),
            *("--catalog", self.catalog, "--heartbeat-interval-s", "0.05", "--node-ttl-s", "60", "--slow-start-s", "0", *flags),
        )
        self.masters[index].facts("ready", deadline_s=DEADLINE_S)
        return self.masters[index]

    def start_node(self, name: str = "n0", *flags: str) -> Child:
        """Start a node, or start it again with the flags it had; returns when the master knows all that it holds."""
        if name not in self._node_ports:
            [self._node_ports[name]] = free_ports(1)
        self._node_flags[name] = flags or self._node_flags[name]
        self.nodes[name] = self._start(
            name,
            self.node_module,
            "kvstore-node",
            *("--master", self.address, "--listen", f"127.0.0.1:{self._node_ports[name]}", "--name", name),
            *("--join-token", JOIN),
            *("--demotion-wait-s", "60"),  # what is put is there, in DRAM or on NVMe
            *("--run-dir", str(self.folder / name), "--reconnect-interval-s", "0.02", "--reconnect-max-interval-s", "0.1"),
            *self._node_flags[name],
        )
        self.nodes[name].facts("ready", deadline_s=DEADLINE_S)
        return self.nodes[name]

    def kill_node(self, name: str = "n0") -> None:
        """Kill the node, and return when clients no longer read its shared-memory index.

        They check its connection once its heartbeat in the index is older than that."""
        self.nodes[name].kill()
        time.sleep(PROBE_NS / 1e9)

    def status(self) -> pb.StatusReply:
        """As the first master that answers has it."""
        if len(self._master_ports) > 1:
            return cluster_status(self.settings)
        self._control = self._control or Control.find(self.settings)
        try:
            return self._control.status()
        except KVStoreError:
            self._forget_control()
            raise

    def start_masters(self, *flags: str) -> None:
        """All of them, the first of which owns the catalog, or most of it."""
        for index in range(len(self._master_ports)):
            self.start_master(index, *flags)

    def start_nodes(self, *flags: str, names: Sequence[str] = ("n0", "n1")) -> None:
        """Return when the master knows all of them."""
        for name in names:
            self.start_node(name, *flags)
        self.await_alive(*names)

    def status_of(self, index: int, partition: int = 0, *, partitions: int = 1) -> pb.StatusReply | None:
        """Return that master's status of the partition, or None while it does not respond."""
        place = f"127.0.0.1:{self._master_ports[index][1]}"
        with contextlib.suppress(KVStoreError), Control(place, self.settings, *[place] * (partitions - 1)) as control:
            return control.status_of(partition)
        return None

    def owned(self, index: int, partitions: int = 1) -> set[int]:
        """Return the partitions that the master reports to own; the empty set while it does not respond."""
        place, found = f"127.0.0.1:{self._master_ports[index][1]}", set[int]()
        with contextlib.suppress(KVStoreError), Control(place, self.settings, *[place] * (partitions - 1)) as control:
            for each in range(partitions):
                with contextlib.suppress(KVStoreError):
                    if control.status_of(each).role == "owner":
                        found.add(each)
        return found

    def is_shared_out(self, partitions: int) -> bool:
        """Return whether each partition is owned by its assigned master, so that none moves any more.

        The numbers of partitions may be equal before that."""
        wanted = shares(frozenset(f"127.0.0.1:{listen}" for listen, _ in self._master_ports), partitions)
        return all(
            self.owned(index, partitions) == {each for each in range(partitions) if wanted[each] == f"127.0.0.1:{listen}"}
            for index, (listen, _) in enumerate(self._master_ports)
        )

    def node_status(self, name: str = "n0") -> pb.NodeStatus:
        return next(node for node in self.status().nodes if node.name == name)

    def await_alive(self, *names: str) -> None:
        """Wait until the master has the whole inventory of these nodes."""

        def all_alive() -> bool:
            with contextlib.suppress(KVStoreError):
                states = {node.name: node.state for node in self.status().nodes}
                return all(states.get(name) == "alive" for name in names)
            return False

        until(all_alive, f"{', '.join(names)} alive at the master", every_s=STATUS_POLL_S)

    def await_settled(self, name: str = "n0") -> pb.NodeStatus:
        """Wait until the node moves no block and the master has heard of all: its status then."""
        told = [self.node_status(name)]
        quiet = 0

        def is_settled() -> bool:
            nonlocal quiet
            node = self.node_status(name)
            if node.heartbeat_age_s < told[-1].heartbeat_age_s:  # another one has come
                is_same = _moves_of(node) == _moves_of(told[-1])
                is_quiet = is_same and not node.counters["publish_backlog"] and not node.counters["moving"]
                quiet = quiet + 1 if is_quiet else 0
            told.append(node)
            return quiet > 1  # the first one may have been on its way when this began

        until(is_settled, f"{name} at rest", every_s=STATUS_POLL_S)
        return told[-1]

    def await_counters(self, name: str = "n0", /, **counts: int) -> None:
        """Wait until the node's heartbeats tell these."""

        def is_told() -> bool:
            told.CopyFrom(self.node_status(name))
            return counts.items() <= dict(told.counters).items()

        told = pb.NodeStatus()
        try:
            until(is_told, f"{name} with {counts}", every_s=STATUS_POLL_S)
        except AssertionError as error:
            found = {counter: told.counters[counter] for counter in counts}
            error.add_note(f"last heard {told.heartbeat_age_s:.1f} s ago, {told.state}: {found}; logs:\n" + "\n".join(self.logs[-40:]))
            raise

    def _forget_control(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control = None

    def _start(self, name: str, module: str, *arguments: str) -> Child:
        environment = {variable: value for variable, value in os.environ.items() if not variable.startswith("KVSTORE_")}
        return Child(
            name,
            module,
            arguments,
            environment=environment | self.environments.get(name, {}),
            on_log=lambda child, line: self.logs.append(f"{child} | {line}"),
            on_end=lambda _child: None,
            start=Forked if module in FORKABLE else launched,
        )


@contextlib.contextmanager
def running_system(
    folder: Path, node: str, *, catalog: str = "memory:", nodes: Sequence[str] = ("n0",), master: str = ""
) -> Iterator[System]:
    """One master and these nodes. `node` and `master` are their flags, "{name}" in the first the node's name; "lmdb:" is a folder of
    the system's own."""
    with System(folder, f"lmdb:{folder / 'catalog'}" if catalog == "lmdb:" else catalog) as system:
        system.start_master(0, *master.split())
        for name in nodes:
            system.start_node(name, *node.format(name=name).split())
        yield system


def _moves_of(node: pb.NodeStatus) -> list[tuple[int, int, int]]:
    return [(tier.blocks, tier.demotions, tier.promotions) for tier in node.tiers]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP inside, SIGCONT afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def process(work: Callable[..., None], *arguments: Any) -> Iterator[tuple[int, Connection]]:
    """`work(connection, *arguments)` in a process of its own: its pid, and our end of the connection."""
    context = multiprocessing.get_context("forkserver")  # which loads this module once for all of them
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs, *arguments))
    child.start()
    theirs.close()
    try:
        assert child.pid is not None
        yield child.pid, ours
    finally:
        ours.close()
        child.kill()
        child.join()
        child.close()


def heard(connection: Connection) -> Any:
    assert connection.poll(DEADLINE_S), "the other process is silent"
    return connection.recv()


def descriptors(pid: int) -> int:
    """Return the number of open descriptors of the process, without those of DRAM slabs, which depend on block sizes."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            count += not os.readlink(entry).startswith("/memfd:")
    return count


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    """One master `memory:` and one node `n0` with 32 MiB of DRAM."""
    with running_system(tmp_path, "--dram 32MiB") as started:
        yield started


def refusal(module: str, *flags: str) -> str:
    """The one line with which the program refuses to start; its exit code is 2."""
    environment = {variable: value for variable, value in os.environ.items() if not variable.startswith("KVSTORE_")}
    forked = Forked(module, flags, environment=environment)
    assert forked.stdout is not None
    assert forked.stderr is not None
    with forked.stdout, forked.stderr:
        said = forked.stderr.read()
    assert forked.wait(DEADLINE_S) == 2, (forked.returncode, said)
    [line] = [line for line in said.splitlines() if line.strip()]
    return line
