"""Nodes that acknowledged puts of this client before the directory committed them (`ack="node"`), and the wait for
their commit. Sans-I/O: see effects.py."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.client.connections.cluster_connections import ClusterConnections
from kvstore.client.connections.locations import LocationCache
from kvstore.client.connections.routes import DaemonId, KnownNode
from kvstore.client.core.effects import Operation
from kvstore.protocol.errors import KVStoreError, Unavailable, Unreachable
from kvstore.protocol.node_messages import WaitCommitted
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.deadline import Deadline

NO_DAEMON_ID: Final = "a route to a node has a daemon id"
SOON_S: Final = 0.25
"""Longest wait of a lookup for preceding puts. A master that commits nothing within it is assumed to have no catalog,
and reads continue."""
COOLDOWN_NS: Final = 1_000_000_000
"""After such a wait failed, lookups do not wait for this long."""
REDISCOVER_NS: Final = 600_000_000_000
"""Time for which a lost node is looked for before removals: it may have hung and still hold all blocks."""


@dataclass(slots=True, eq=False)
class _UncommittedPut:
    """Puts sent to one node since its last flush. `instance` is the epoch of the process that replied, 0 while none
    has."""

    node: KnownNode
    puts: int = 0
    """Incremented when a put begins and when it ends."""
    instance: int = 0
    is_counted: bool = False
    """Counted as lost since the node was given up; no put was sent there since."""


class UncommittedPuts:
    """Uncommitted puts of one client, one entry per node. Threads and tasks share it."""

    def __init__(self, daemons: ClusterConnections, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._daemons = daemons
        self._clock_ns = clock_ns
        self._nodes: dict[DaemonId, _UncommittedPut] = {}
        self._unreachable: dict[DaemonId, tuple[_UncommittedPut, int]] = {}
        """Nodes that were given up, with the time until which they are looked for."""
        self._lost: dict[str, int] = {}
        """Loss number by name, of nodes that were lost with uncommitted blocks."""
        self._losses = self._reported = 0
        """Losses so far, and those that a flush has reported. A flush that began earlier reports them too."""
        self._flushes = 0
        """Flushes in progress."""
        self._lock = threading.Lock()
        self._cooldown_until_ns = 0
        self.has_unhinted = False
        """See `note_already_present`."""

    def __len__(self) -> int:
        """Number of nodes that may have uncommitted blocks of this client."""
        return len(self._nodes)

    def may_have(self, keys: Sequence[bytes], hints: LocationCache) -> bool:
        """Return whether a lookup of these keys must wait for commits: the location cache shows an uncommitted put, or is
        incomplete."""
        if not self._nodes:
            return False
        return self.has_unhinted or hints.has_dropped or any(hint is not None and not hint.generation for hint in hints.find(keys))

    def begin(self, node: KnownNode) -> None:
        """A put is about to be sent to the node."""
        daemon_id = node.route.daemon_id
        assert daemon_id is not None, NO_DAEMON_ID
        with self._lock:
            uncommitted = self._nodes.get(daemon_id)
            if uncommitted is None:
                uncommitted = self._nodes[daemon_id] = _UncommittedPut(node)
            uncommitted.puts += 1
            uncommitted.is_counted = False

    def answered(self, node: KnownNode, instance: int) -> None:
        """A put to the node's process `instance` has ended. A concurrent flush may have overtaken it."""
        daemon_id = node.route.daemon_id
        assert daemon_id is not None, NO_DAEMON_ID
        with self._lock:
            uncommitted = self._nodes.get(daemon_id)
            if uncommitted is None:
                uncommitted = self._nodes[daemon_id] = _UncommittedPut(node)
            uncommitted.puts += 1
            uncommitted.is_counted = False
            if uncommitted.instance not in (0, instance):
                self._lose(node)
            uncommitted.instance = instance

    def note_already_present(self) -> None:
        """A node had some of the keys already, perhaps uncommitted; the location cache does not have them."""
        with self._lock:
            self.has_unhinted = True

    def flush(self, deadline: Deadline) -> Operation[None]:
        """Wait until all preceding puts are committed to the directory.

        Raises Unavailable: a node was lost with uncommitted blocks (reported once, by every flush that had begun), or
        is unreachable, or no master is. Raises DeadlineExceeded: some puts are not committed yet.
        """
        failure: Unavailable | None = None
        with self._lock:
            reported = self._reported
            self._flushes += 1
        try:
            for daemon_id, uncommitted in list(self._nodes.items()):
                try:
                    yield from self._flush(daemon_id, uncommitted, deadline)
                except Unavailable as error:
                    failure = failure or error
            with self._lock:
                lost = [name for name, loss in self._lost.items() if loss > reported]
                self._reported = self._losses
        finally:
            with self._lock:
                self._flushes -= 1
                if not self._flushes and self._reported == self._losses:
                    self._lost.clear()
        if lost:
            raise Unavailable(f"uncommitted blocks are lost, because these nodes died or restarted: {', '.join(lost)}")
        if failure is not None:
            raise failure

    def settle(self, deadline: Deadline) -> Operation[None]:
        """As `flush`, for operations on all existing blocks: lost ones do not count. A lost node that is back commits
        its blocks first.

        Raises DeadlineExceeded; Unavailable, also for a live node that cannot be reached, whose blocks would appear
        afterwards.
        """
        failure: Unreachable | None = None
        if self._unreachable:
            yield from self._rediscover_unreachable(deadline)
        for daemon_id, uncommitted in list(self._nodes.items()):
            try:
                yield from self._flush(daemon_id, uncommitted, deadline)
            except Unreachable as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def settle_briefly(self, deadline: Deadline) -> Operation[bool]:
        """As `settle`, for up to SOON_S and without errors. False: nothing to wait for."""
        if not self._nodes or self._clock_ns() < self._cooldown_until_ns:
            return False
        try:
            yield from self.settle(deadline.part(SOON_S))
        except KVStoreError:
            self._cooldown_until_ns = self._clock_ns() + COOLDOWN_NS
        return True

    def _flush(self, daemon_id: DaemonId, uncommitted: _UncommittedPut, deadline: Deadline) -> Operation[None]:
        puts = uncommitted.puts
        try:
            connection, _flags = yield from self._daemons.begin(uncommitted.node.route, WaitCommitted(), Flags, deadline)
        except Unreachable:
            yield from self._daemons.refresh_nodes(deadline)
            node = self._daemons.nodes.find(daemon_id)
            if node is None:
                self._end(daemon_id, uncommitted, is_lost=True, is_unreachable=True)
                return
            if node.route is uncommitted.node.route:
                raise
            uncommitted.node = node  # a new master's table has another route: the ticket of the old one is not renewed
            connection, _flags = yield from self._daemons.begin(node.route, WaitCommitted(), Flags, deadline)
        instance = connection.channel.welcome.epoch
        connection.release()
        if uncommitted.instance not in (0, instance):
            self._end(daemon_id, uncommitted, is_lost=True)
        else:
            self._end(daemon_id, uncommitted, puts=puts)

    def _rediscover_unreachable(self, deadline: Deadline) -> Operation[None]:
        yield from self._daemons.refresh_nodes(deadline)
        with self._lock:
            for daemon_id, (uncommitted, until_ns) in list(self._unreachable.items()):
                is_back = self._daemons.nodes.is_live(daemon_id)
                if is_back:
                    self._nodes.setdefault(daemon_id, uncommitted)
                if is_back or until_ns < self._clock_ns():
                    del self._unreachable[daemon_id]

    def _end(
        self,
        daemon_id: DaemonId,
        uncommitted: _UncommittedPut,
        *,
        puts: int | None = None,
        is_lost: bool = False,
        is_unreachable: bool = False,
    ) -> None:
        """Drop the node's entry, unless puts have begun or ended since `puts` was read (None: drop it in any case)."""
        with self._lock:
            if self._nodes.get(daemon_id) is uncommitted and puts in (None, uncommitted.puts):
                del self._nodes[daemon_id]
                self.has_unhinted &= bool(self._nodes)
                if is_lost and uncommitted.instance and not uncommitted.is_counted:  # without a reply, no put was acknowledged
                    uncommitted.is_counted = True
                    self._lose(uncommitted.node)
                if is_unreachable:
                    self._unreachable[daemon_id] = (uncommitted, self._clock_ns() + REDISCOVER_NS)

    def _lose(self, node: KnownNode) -> None:
        """Count a loss. The lock is held."""
        self._losses += 1
        self._lost[node.name] = self._losses
