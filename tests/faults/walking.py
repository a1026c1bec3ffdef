"""A small cluster under load whose processes are killed at fail points, one after the other: the walk over all of them.

One master on a catalog that outlives it, two nodes with little DRAM above NVMe, three clients; all of them are processes. After
each strike the results of the clients' operations are checked by their journals.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvstore.cli.tools.child import Child
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.client.local.nodes import PROBE_NS
from kvstore.protocol.errors import KVStoreError
from kvstore.testing.transfer.awaited import eventually
from tests.faults.beside import meanwhile
from tests.faults.client import Plan
from tests.faults.fail_points import Controlled
from tests.faults.journal import read
from tests.faults.judging import Circumstances, Judge, Times, Verdict
from tests.forked import Forked
from tests.system.running import DEADLINE_S, System

NODES: Final = ("n0", "n1")
CLIENTS: Final = 3
"""A blocking and an asynchronous client on the nodes' host, and one that treats the nodes as remote."""
ROLES: Final = {"master": ["master-0"], "node": [*NODES], "client": [f"client-{writer}" for writer in range(CLIENTS)]}
CALL_S: Final = 10.0
"""Deadline of a call. An expired deadline alone is no failure, since the machine may be busy."""
PAUSE_S: Final = 0.025
NODE_FLAGS: Final = ("--dram", "8MiB", "--high-watermark", "0.4", "--low-watermark", "0.2")
LARGE: Final = 200 << 10
UNLINKED: Final = "node.publish.register.after"
"""A node that dies here has no link yet, so the master does not notice at once. Its name stays taken until its heartbeat times out."""
ASKING: Final = ClientSettings(use_index=False)


class Walk:
    """The cluster. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.system = System(folder, f"lmdb:{folder / 'catalog'}")
        self.system.node_module, self.system.master_module = "tests.faults.daemon", "tests.faults.daemon"
        self._points = {name: Controlled(folder / f"points-{name}") for names in ROLES.values() for name in names}
        for name, points in self._points.items():
            self.system.environments[name] = points.environment
        self._clients: dict[int, Child] = {}
        self._lives: dict[int, int] = defaultdict(int)
        self._disturbed: list[tuple[int, int]] = []
        self._lost: dict[int, list[int]] = defaultdict(list)

    def __enter__(self) -> "Walk":
        self.system.start_master()
        for name in NODES:
            self.system.start_node(name, *NODE_FLAGS, "--nvme", f"{self._folder / f'nvme-{name}'}:128MiB")
        self.system.await_alive(*NODES)
        for writer in range(CLIENTS):
            self._start_client(writer)
        return self

    def __exit__(self, *error: object) -> None:
        for child in self._clients.values():
            child.kill()
        self.system.__exit__(*error)

    # --- strikes ---

    def strike(self, point: str, trigger: str) -> Verdict:
        """Kill the first process of the point's role that reaches the point, restart it, and check all results since.

        `trigger`: "load": the clients' load reaches the point; "start": a start reaches it, so one process is killed first; otherwise the
        action of that name in TRIGGERS runs meanwhile.
        """
        began_ns = time.monotonic_ns()
        names = ROLES[point.split(".")[0]]
        if trigger == "start":
            names = names[:1]
            self._child(names[0]).kill()
        for one in names:
            self._points[one].arm(f"{point}=kill")
        if trigger == "start":
            with contextlib.suppress(KVStoreError):  # it dies before it is ready, or soon after
                self._restart(names[0])
        with meanwhile(lambda: _attempt(TRIGGERS[trigger], self.system)) if trigger in TRIGGERS else contextlib.nullcontext():
            eventually(lambda: any(self._points[one].struck for one in names), f"{point} is passed")
        for one in names:
            self._points[one].disarm()
        eventually(lambda: all(self._points[one].is_armed or self._points[one].struck for one in names), "nothing strikes any more")
        dead = [one for one in names if self._points[one].struck]
        for one in dead:
            assert "SIGKILL" in str(self._child(one).failure())
        time.sleep(PROBE_NS / 1e9)  # from then on clients do not read what it showed
        for one in dead:
            if one in NODES:
                self._lost[NODES.index(one)].append(time.monotonic_ns())
            self._child(one).kill()
            if point == UNLINKED:  # a master that starts considers no node alive
                self._child("master-0").kill()
                self._restart("master-0")
            self._restart(one)
        self.system.await_alive(*NODES)
        if trigger == "drain":  # it may have been struck between the drain and its end
            with Control.find(self.system.settings) as control:
                control.drain("n0", cancel=True)
        self._disturbed.append((began_ns, time.monotonic_ns()))
        return self.judged(since_ns=began_ns)

    def judged(self, *, since_ns: int = 0) -> Verdict:
        journals = sorted(self._folder.glob("client-*.journal"))
        told = Circumstances(Times(self._disturbed), lost=self._lost)
        return Judge([(int(path.name.split("-")[1]), read(path)) for path in journals], told).judge(since_ns=since_ns)

    def end_load(self) -> None:
        """The clients end, each when its operation has."""
        for child in self._clients.values():
            child.terminate()
        for child in self._clients.values():
            child.facts("over", deadline_s=DEADLINE_S)
            assert child.stop(DEADLINE_S)

    def _child(self, name: str) -> Child:
        if name.startswith("client"):
            return self._clients[int(name[-1])]
        return self.system.nodes[name] if name in NODES else self.system.masters[0]

    def _restart(self, name: str) -> None:
        if name.startswith("client"):
            self._start_client(int(name[-1]))
        elif name in NODES:
            self.system.start_node(name)
        else:
            self.system.start_master()

    def _start_client(self, writer: int) -> None:
        self._lives[writer] += 1
        where, life = str(self._folder), self._lives[writer]
        plan = Plan(self.system.address, where, writer, life, CLIENTS, CALL_S, is_async=writer == 1, is_far=writer == 2, pause_s=PAUSE_S)
        self._clients[writer] = child = Child(
            f"client-{writer}",
            "tests.faults.client",
            [plan.packed()],
            environment=self._points[f"client-{writer}"].environment,
            on_log=lambda name, line: self.system.logs.append(f"{name} | {line}"),
            on_end=lambda _child: None,
            start=Forked,
        )
        child.facts("ready", deadline_s=DEADLINE_S)


# --- actions that the clients' load does not include ---


def _come(system: System) -> None:
    """Start a client, which locates every daemon. Its calls end soon after the daemon that they wait for has been killed."""
    with system.client(deadline_s=CALL_S) as client:
        client.put(b"large", bytes(LARGE))
        client.get(b"large")
        client.remove([b"large"])


def _ask(system: System) -> None:
    """One that maps memory, but asks for what it reads."""
    with system.client(settings=ASKING, deadline_s=CALL_S) as client:
        client.put(b"asked", bytes(LARGE))
        client.get(b"asked")
        with client.view(b"asked"):
            pass
        client.remove([b"asked"])


def _drain(system: System) -> None:
    """Empty a node, for as long as a look at it takes, and take it back."""
    with Control.find(system.settings) as control:
        for to in ("nvme", "peers"):
            control.drain("n0", to=to)
            time.sleep(0.2)
            control.drain("n0", cancel=True)
            time.sleep(0.05)


def _attempt(act: Callable[[System], None], system: System) -> None:
    """Call `act` and ignore errors of the store: the fault may hit this call, too."""
    with contextlib.suppress(KVStoreError):
        act(system)


TRIGGERS: Final[dict[str, Callable[[System], None]]] = {"come": _come, "ask": _ask, "drain": _drain}
