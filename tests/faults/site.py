"""A cluster on several hosts of this machine, all real processes: on each of three hosts a member of etcd, a master, a node and clients,
on a fourth one clients only. Each process has a name (e0, m0, n0, c0 ...) and comes back where it was.
"""

import contextlib
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.cli.tools.child import Child
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import KVStoreError
from tests.credentials import JOIN, OPERATOR, tokens_file
from tests.etcd_cluster import EtcdCluster
from tests.faults.client import Plan
from tests.faults.fail_points import Controlled
from tests.faults.hosts import StarHosts
from tests.forked import Forked

if TYPE_CHECKING:
    from tests.faults.moves import Moved

SERVERS: Final = 3
"""Hosts with daemons; one more has none."""
CLIENTS: Final = 8
TASKED: Final = (1, 6)
"""Clients of tasks; the others block."""
MASTER_PORT, CONTROL_PORT, NODE_PORT = 7440, 7441, 7450
TENANT, TOKEN = "red", "secret"
FILLER, FILLER_TOKEN = "blue", "another secret"
"""Tenant that fills nodes."""
START_S: Final = 120.0
LOOK_S: Final = 2.0
"""The deadline of a look at a master."""
PEER_TIMEOUT_S: Final = 1.0
NODE_FLAGS: Final = (
    *("--dram", "12MiB", "--high-watermark", "0.85", "--low-watermark", "0.7", "--demotion-wait-s", "60"),
    *("--put-ttl-s", "5", "--tier-retry-s", "1", "--control-timeout-s", "1"),
    *("--reconnect-interval-s", "0.05", "--reconnect-max-interval-s", "0.2"),
)


class Site:
    """A context manager. Methods may be called from several threads, those of one name from one at a time."""

    def __init__(
        self, folder: Path, hosts: StarHosts, *, lease_s: float, deadline_s: float, pause_s: float = 0.0, partitions: int = 1
    ) -> None:
        """The calling thread, and all that use it, are on the last of `hosts`. A master or node silent for `lease_s` counts as dead.
        Clients rest for `pause_s` after each operation. The key space has so many `partitions`."""
        self.folder = folder
        self.hosts = hosts
        self.lease_s = lease_s
        self.deadline_s = deadline_s
        self._pause_s = pause_s
        self.partitions = partitions
        places = [(hosts.address(host), hosts.prefix(host)) for host in range(SERVERS)]
        (folder / "etcd").mkdir()
        self.etcd = EtcdCluster(folder / "etcd", places=places)
        self.masters = ",".join(f"{hosts.address(host)}:{MASTER_PORT}" for host in range(SERVERS))
        self.names = [
            f"{role}{index}" for role, count in (("e", SERVERS), ("m", SERVERS), ("n", SERVERS), ("c", CLIENTS)) for index in range(count)
        ]
        self.points = {name: Controlled(folder / f"points-{name}") for name in self.names}
        self.settings = ClientSettings(master=self.masters, tenant=TENANT, token=OPERATOR, deadline_s=LOOK_S)
        self._tokens = tokens_file(folder, {TENANT: TOKEN, FILLER: FILLER_TOKEN})
        self.lives: dict[str, int] = defaultdict(int)
        self._children: dict[str, Child] = {}
        self._logs = threading.Lock()
        self.moved: list[Moved] = []
        """Faults that struck while blocks moved (moves.py)."""

    def __enter__(self) -> "Site":
        try:
            self.etcd.start()
            with ThreadPoolExecutor(SERVERS) as threads:
                for role in "mn":
                    list(threads.map(self.start, (f"{role}{index}" for index in range(SERVERS))))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGCONT)
            child.kill()
        self._children.clear()
        self.etcd.remove()

    # --- its processes ---

    def host(self, name: str) -> int:
        index = int(name[1:])
        return min(index // 2, SERVERS) if name[0] == "c" else index

    def start(self, name: str) -> None:
        """Start it, or start it again; returns when it serves. A node need not know a master by then, nor a master etcd."""
        self.lives[name] += 1
        if name[0] == "e":
            self.etcd.start([self.etcd.members[int(name[1:])]])
            return
        self._start(name)
        event = "serving" if name[0] == "n" else "ready"
        self._children[name].facts(event, deadline_s=START_S)

    def kill(self, name: str) -> None:
        """SIGKILL; one that has ended is left alone."""
        if name[0] == "e":
            self.etcd.members[int(name[1:])].kill()
        else:
            self._children[name].kill()

    def pid(self, name: str) -> int:
        return self.etcd.members[int(name[1:])].pid if name[0] == "e" else self._children[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    def await_end(self, name: str, deadline_s: float) -> bool:
        """Return whether the process has ended without a signal from here by the deadline, and reap it."""
        end_s = time.monotonic() + deadline_s
        while time.monotonic() < end_s:
            if not Path(f"/proc/{self.pid(name)}").exists():
                self._children[name].failure()
                return True
            time.sleep(0.02)
        return False

    def end_clients(self, deadline_s: float) -> list[str]:
        """Have them end what they do; those that did not in time."""
        names = [name for name in self.names if name[0] == "c"]
        for name in names:
            self._children[name].terminate()
        return [name for name in names if not self._children[name].stop(deadline_s)]

    def _start(self, name: str) -> None:
        host, folder = self.host(name), self.folder / name
        address = self.hosts.address(host)
        if name[0] == "c":
            module, flags = "tests.faults.client", [self._plan(name).packed()]
        elif name[0] == "m":
            module, lease_s = "tests.faults.daemon", self.lease_s
            flags = f"kvstore-master --listen {address}:{MASTER_PORT} --control {address}:{CONTROL_PORT} --run-dir {folder}".split()
            flags += f"--tokens {self._tokens} --catalog {self.etcd.url} --partitions {self.partitions} --slow-start-s 0".split()
            flags += f"--lease-ttl-s {lease_s} --node-ttl-s {lease_s} --heartbeat-interval-s {lease_s / 8}".split()
            flags += f"--peer-timeout-s {PEER_TIMEOUT_S} --hot-copies 1 --hot-reads-per-s 0.5".split()
        else:
            module = "tests.faults.daemon"
            flags = f"kvstore-node --master {self.masters} --listen {address}:{NODE_PORT} --name {name} --run-dir {folder}".split()
            flags += ["--join-token", JOIN, *NODE_FLAGS, *f"--nvme {folder / 'nvme'}:64MiB --peer-timeout-s {PEER_TIMEOUT_S}".split()]
        folder.mkdir(exist_ok=True)
        plain = {variable: value for variable, value in os.environ.items() if not variable.startswith("KVSTORE_")}
        self._children[name] = Child(
            name,
            module,
            flags,
            environment={**plain, **self.points[name].environment},
            on_log=self._log,
            on_end=lambda _child: None,
            start=partial(Forked, host=self.hosts.names[host]),
        )

    def _plan(self, name: str) -> Plan:
        index = int(name[1:])
        return Plan(
            self.masters,
            str(self.folder),
            index,
            self.lives[name],
            CLIENTS,
            self.deadline_s,
            index in TASKED,
            tenant=TENANT,
            token=TOKEN,
            pause_s=self._pause_s,
        )

    def _log(self, name: str, line: str) -> None:
        with self._logs, (self.folder / "log").open("a") as log:
            log.write(f"{time.monotonic():.3f} {name} | {line}\n")

    # --- what it says of itself ---

    def status(self) -> pb.StatusReply | None:
        """Return the cluster's status from the owner of the catalog, or None while no master can report it."""
        with contextlib.suppress(KVStoreError), Control.find(self.settings) as control:
            return control.status()
        return None

    def owner(self) -> str | None:
        """The name of the master that owns the catalog."""
        status = self.status()
        hosts = {f"{self.hosts.address(host)}:{MASTER_PORT}": f"m{host}" for host in range(SERVERS)}
        return hosts.get(status.owner.address) if status is not None else None

    def used(self) -> dict[str, dict[str, int]]:
        """By daemon: its own memory in bytes, and its open descriptors."""
        return {name: _used(self.pid(name)) for name in self.names if name[0] in "mn"}


def settled(status: pb.StatusReply | None) -> bool:
    """Each partition has an owner, and all nodes are alive, as all owners have it."""
    if status is None or status.role != "owner" or not all(owner.name for owner in status.owners):
        return False
    return [node.state for node in status.nodes] == ["alive"] * SERVERS


def epochs(status: pb.StatusReply) -> tuple[int, ...]:
    """Of the owners of all partitions."""
    return (status.owner.epoch, *(owner.epoch for owner in status.owners))


def _used(pid: int) -> dict[str, int]:
    text = Path(f"/proc/{pid}/status").read_text()
    [anonymous_kb] = [int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon:")]
    return {"memory_bytes": anonymous_kb << 10, "descriptors": sum(1 for _ in _descriptors(pid))}


def _descriptors(pid: int) -> Iterator[Any]:
    """Those of DRAM's slabs left out: which slabs there are depends on the sizes of blocks."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            if not os.readlink(entry).startswith("/memfd:"):
                yield entry
