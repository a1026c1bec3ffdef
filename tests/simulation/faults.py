"""Faults of a schedule, applied to a cluster.

Each ends after its span: partitions are healed, stopped processes resume, dead processes are restarted.
"""

from collections.abc import Callable
from functools import partial

from kvstore.protocol.errors import TierFailed
from tests.simulation.cluster import ClientProcess, Cluster, Daemon
from tests.simulation.network import SimSocket
from tests.simulation.schedule import ENDED, Step
from tests.simulation.world import MS, Host, Process, S


class Faults:
    """Applies faults. `under_way` is the number of faults that have not ended."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._network = cluster.machine.network
        self.under_way = 0
        self.last_ns = -1
        """Time at which a fault last began or ended; -1: never."""
        self._broken_ns = -1
        """The same without the orderly shutdown of masters, which hand over their partitions."""
        self._down: set[str] = set()
        """Daemons whose restart is under way."""
        self.deaths = 0
        """Number of node deaths, each of which lost memory."""

    def is_calm_since(self, at_ns: int) -> bool:
        return self.under_way == 0 and (self.last_ns < 0 or self.last_ns < at_ns)

    def is_orderly_since(self, at_ns: int) -> bool:
        """Return whether no fault but an orderly shutdown of masters has happened since."""
        return self._broken_ns < 0 or self._broken_ns < at_ns

    def apply(self, step: Step) -> None:
        cluster, kind, args = self._cluster, step.kind, step.args
        self._world.trace("fault", step)
        self._happens(is_end=kind == ENDED)
        match kind:
            case "kill_master":
                self._kill(cluster.masters[args[0]], args[1])
            case "end_master":
                self._end_master(cluster.masters[args[0]], args[1])
            case "kill_node":
                self._kill(cluster.nodes[args[0]], args[1])
            case "end_node":
                self._end(cluster.nodes[args[0]], args[1])
            case "stop_master":
                self._stop(cluster.masters[args[0]].process, args[1])
            case "stop_node":
                self._stop(cluster.nodes[args[0]].process, args[1])
            case "stop_client":
                self._stop(cluster.clients[args[0]].process, args[1])
            case "kill_client":
                cluster.clients[args[0]].process.die()
                cluster.clients[args[0]].start()
            case "cut":
                self._cut(cluster.hosts[args[0]], cluster.hosts[args[1]], args[2])
                self._cut(cluster.hosts[args[1]], cluster.hosts[args[0]], args[2])
            case "cut_one_way":
                self._cut(cluster.hosts[args[0]], cluster.hosts[args[1]], args[2])
            case "cut_etcd":
                self._cut(cluster.hosts[args[0]], cluster.etcd_host, args[1])
                self._cut(cluster.etcd_host, cluster.hosts[args[0]], args[1])
            case "cut_etcd_all":
                for host in cluster.hosts:
                    self._cut(host, cluster.etcd_host, args[1])
            case "reset":
                self._reset(args[0])
            case "clock":
                cluster.hosts[args[0]].wall_offset_ns += args[1] * S
            case "vanish":
                self._vanish(cluster.hosts[args[0]], args[1])
            case "slow":
                self._slow(args[1])
            case "disk":
                self._fail_disk(cluster.nodes[args[0]], args[1])
            case _:
                raise AssertionError(f"there is no fault {kind!r}")

    def _happens(self, *, is_end: bool) -> None:
        self.last_ns = self._world.now_ns
        if not is_end:
            self._broken_ns = self.last_ns

    def _later(self, span_ms: int, end: Callable[[], None], *, is_end: bool = False) -> None:
        self.under_way += 1

        def over() -> None:
            self.under_way -= 1
            self._happens(is_end=is_end)
            self._world.trace("healed")
            end()

        self._world.after(span_ms * MS, over)

    def _kill(self, daemon: Daemon, span_ms: int) -> None:
        """SIGKILL, and a new process after `span_ms`."""
        if daemon.name in self._down or daemon.process is None:
            return
        self._down.add(daemon.name)
        self.deaths += daemon in self._cluster.nodes
        self._cluster.kill(daemon)

        def begin() -> None:
            self._down.discard(daemon.name)
            self._cluster.start_daemon(daemon)

        self._later(span_ms, begin)

    def _end(self, daemon: Daemon, span_ms: int) -> None:
        """SIGTERM: the node writes its DRAM to NVMe as far as it fits, and the process ends."""
        node, process = daemon.node, daemon.process
        if daemon.name in self._down or node is None or process is None or process.is_stopped or node._storage.drainer.is_closed:
            return
        process.soon(node.end)

        def gone() -> None:
            if daemon.process is process:
                self._kill(daemon, 100)

        self._later(span_ms, gone)

    def _end_master(self, daemon: Daemon, span_ms: int) -> None:
        """SIGTERM: the master gives up its partitions and the process ends. A new one starts after `span_ms`."""
        master, process = daemon.master, daemon.process
        if daemon.name in self._down or master is None or process is None or process.is_stopped:
            return
        self._down.add(daemon.name)

        def end() -> None:
            master.close()
            self._world.after(0, lambda: self._cluster.kill(daemon))

        def begin() -> None:
            self._down.discard(daemon.name)
            self._cluster.kill(daemon)  # still alive if it was stopped before it could end
            self._cluster.start_daemon(daemon)

        process.spawn(end, "end")
        self._later(span_ms, begin, is_end=True)

    def _stop(self, process: Process | None, span_ms: int) -> None:
        """SIGSTOP and SIGCONT."""
        if process is None or process.is_stopped:
            return
        process.stop()
        self._later(span_ms, process.resume)

    def _cut(self, source: Host, target: Host, span_ms: int) -> None:
        if source is not target:
            self._network.cut(source, target)
            self._later(span_ms, lambda: self._network.heal(source, target))

    def _reset(self, count: int) -> None:
        """Reset connections between hosts; data in flight is lost."""
        found = [sock for sock in self._network.connections if sock.is_open and sock.process.host is not sock.peer.process.host]
        for sock in self._world.rng.sample(found, min(count, len(found))):
            self._network.reset(sock)

    def _vanish(self, host: Host, span_ms: int) -> None:
        """The host loses power: no connection is closed, and after `span_ms` its processes are restarted."""
        daemons = [daemon for daemon in self._cluster.daemons if daemon.host is host and daemon.process is not None]
        if any(daemon.name in self._down for daemon in daemons):
            return
        others = [*self._cluster.hosts, self._cluster.etcd_host]
        for other in others:
            self._cut(host, other, span_ms)
            self._cut(other, host, span_ms)
        for daemon in daemons:
            self._silence(daemon.process)
            self._kill(daemon, span_ms + 10)
        for client in self._cluster.clients:
            if client.host is host:
                self._silence(client.process)
                client.process.die()
                self._later(span_ms + 10, partial(_start_again, client))

    def _silence(self, process: Process | None) -> None:
        """Drop its connections to other hosts without a notification of the peers."""
        for sock in self._network.connections:
            for end in (sock, sock.peer):
                if end.process is process and end.process.host is not end.peer.process.host:
                    _drop(end)

    def _slow(self, span_ms: int) -> None:
        """Delay messages by up to 80 ms, and lose one of ten at its first transmission."""
        network = self._network
        former = network.max_delay_ns, network.loss
        network.max_delay_ns, network.loss = 80 * MS, 0.1

        def over() -> None:
            network.max_delay_ns, network.loss = former

        if former[1] == 0.0:
            self._later(span_ms, over)

    def _fail_disk(self, daemon: Daemon, span_ms: int) -> None:
        """Fail every write to the disk."""
        daemon.disk.failure = TierFailed("nvme: Input/output error")

        def over() -> None:
            daemon.disk.failure = None

        self._later(span_ms, over)


def _start_again(client: ClientProcess) -> None:
    """Restart the client unless another fault has: a second process would leave the first without an owner."""
    if not client.process.is_alive:
        client.start()


def _drop(end: SimSocket) -> None:
    end.is_open = False
