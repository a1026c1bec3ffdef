"""Which nodes answered puts of this client before the cluster knew the blocks (`ack="node"`), and how the client waits until it does.
Sans-I/O: see effects.py."""

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

WHO: Final = "a node's route names the process that is meant"
SOON_S: Final = 0.25
"""How long a question waits for the puts before it. A master that decides nothing meanwhile has no catalog now, and reads go on."""
REST_NS: Final = 1_000_000_000
"""After it did not, the next questions are asked at once for so long."""
AWAY_NS: Final = 600_000_000_000
"""For so long a node that was given up is looked for before a removal: it may have hung, and have all that was put there still."""


@dataclass(slots=True, eq=False)
class _UncommittedPut:
    """What one node was sent since it was last flushed. `instance` is the process that answered, 0 while none has."""

    node: KnownNode
    puts: int = 0
    """Each counts when it begins and when it is over."""
    instance: int = 0
    is_counted: bool = False
    """As lost, since the node was given up; nothing was put there since."""


class UncommittedPuts:
    """Threads and tasks of a client share it. It keeps an entry a node, however much is put there."""

    def __init__(self, daemons: ClusterConnections, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._daemons = daemons
        self._clock_ns = clock_ns
        self._nodes: dict[DaemonId, _UncommittedPut] = {}
        self._away: dict[DaemonId, tuple[_UncommittedPut, int]] = {}
        """Nodes that were given up, and until when they are looked for."""
        self._lost: dict[str, int] = {}
        """Names of nodes that are gone since, and with them what the cluster did not know; the losses up to then."""
        self._losses = self._told = 0
        """Losses so far, and those of them that a flush has told: one that had begun before tells them, too."""
        self._flushes = 0
        """Under way."""
        self._lock = threading.Lock()
        self._rest_until_ns = 0
        self.has_unhinted = False
        """See `had_some`."""

    def __len__(self) -> int:
        """Nodes that may have blocks of this client which the cluster does not know."""
        return len(self._nodes)

    def may_have(self, keys: Sequence[bytes], hints: LocationCache) -> bool:
        """Whether a question about these keys has to wait for puts: this client put one of them early, as far as its hints tell, or they do
        not tell all."""
        if not self._nodes:
            return False
        return self.has_unhinted or hints.has_dropped or any(hint is not None and not hint.generation for hint in hints.find(keys))

    def begin(self, node: KnownNode) -> None:
        """A put is about to be sent to the node."""
        who = node.route.who
        assert who is not None, WHO
        with self._lock:
            early = self._nodes.get(who)
            if early is None:
                early = self._nodes[who] = _UncommittedPut(node)
            early.puts += 1
            early.is_counted = False

    def answered(self, node: KnownNode, instance: int) -> None:
        """A put that was sent to the node's process `instance` is over. A flush that went out while it was under way may have passed it."""
        who = node.route.who
        assert who is not None, WHO
        with self._lock:
            early = self._nodes.get(who)
            if early is None:
                early = self._nodes[who] = _UncommittedPut(node)
            early.puts += 1
            early.is_counted = False
            if early.instance not in (0, instance):
                self._lose(node)
            early.instance = instance

    def had_some(self) -> None:
        """A node had some of the keys already, which the cluster may not know either, and of which this client has no hint."""
        with self._lock:
            self.has_unhinted = True

    def flush(self, deadline: Deadline) -> Operation[None]:
        """Come back when the cluster knows everything that was put before.

        Raises Unavailable: a node is gone since, and with it what the cluster did not know (which is told once, by all flushes that had
        begun by then), or it cannot be reached, or no master can. Raises DeadlineExceeded: the master has not decided about all of it yet.
        """
        failure: Unavailable | None = None
        with self._lock:
            told = self._told
            self._flushes += 1
        try:
            for who, early in list(self._nodes.items()):
                try:
                    yield from self._flush(who, early, deadline)
                except Unavailable as error:
                    failure = failure or error
            with self._lock:
                lost = [name for name, loss in self._lost.items() if loss > told]
                self._told = self._losses
        finally:
            with self._lock:
                self._flushes -= 1
                if not self._flushes and self._told == self._losses:
                    self._lost.clear()
        if lost:
            raise Unavailable(f"{', '.join(lost)}: gone, or started anew, and with it what was put there and was not known to the cluster")
        if failure is not None:
            raise failure

    def settle(self, deadline: Deadline) -> Operation[None]:
        """As `flush`, for what is done to all blocks that there are: those that are lost are none. Raises DeadlineExceeded;
        Unavailable, too, of a node that lives and cannot be reached: what is there would come to be known afterwards. A node that was given
        up and is there again has its blocks known first, too."""
        failure: Unreachable | None = None
        if self._away:
            yield from self._look_for_them(deadline)
        for who, early in list(self._nodes.items()):
            try:
                yield from self._flush(who, early, deadline)
            except Unreachable as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def settle_soon(self, deadline: Deadline) -> Operation[bool]:
        """As `settle`, for a question that has an answer all the same, and does not wait for long. False: there was nothing to wait for."""
        if not self._nodes or self._clock_ns() < self._rest_until_ns:
            return False
        try:
            yield from self.settle(deadline.part(SOON_S))
        except KVStoreError:
            self._rest_until_ns = self._clock_ns() + REST_NS
        return True

    def _flush(self, who: DaemonId, early: _UncommittedPut, deadline: Deadline) -> Operation[None]:
        puts = early.puts
        try:
            loan, _flags = yield from self._daemons.begin(early.node.route, WaitCommitted(), Flags, deadline)
        except Unreachable:
            yield from self._daemons.refresh_nodes(deadline)
            node = self._daemons.nodes.by(who)
            if node is None:
                self._end(who, early, is_lost=True, is_away=True)
                return
            if node.route is early.node.route:
                raise
            early.node = node  # another master has named it since, by a route of its own: the former one's ticket is renewed no more
            loan, _flags = yield from self._daemons.begin(node.route, WaitCommitted(), Flags, deadline)
        instance = loan.channel.welcome.epoch
        loan.release()
        if early.instance not in (0, instance):
            self._end(who, early, is_lost=True)
        else:
            self._end(who, early, puts=puts)

    def _look_for_them(self, deadline: Deadline) -> Operation[None]:
        yield from self._daemons.refresh_nodes(deadline)
        with self._lock:
            for who, (early, until_ns) in list(self._away.items()):
                is_back = self._daemons.nodes.is_live(who)
                if is_back:
                    self._nodes.setdefault(who, early)
                if is_back or until_ns < self._clock_ns():
                    del self._away[who]

    def _end(self, who: DaemonId, early: _UncommittedPut, *, puts: int | None = None, is_lost: bool = False, is_away: bool = False) -> None:
        """Nothing is left to be flushed, but for what has begun or ended since there were `puts` (None: that, too, was for nothing)."""
        with self._lock:
            if self._nodes.get(who) is early and puts in (None, early.puts):
                del self._nodes[who]
                self.has_unhinted &= bool(self._nodes)
                if is_lost and early.instance and not early.is_counted:  # of what nobody has answered no put was told to be stored
                    early.is_counted = True
                    self._lose(early.node)
                if is_away:
                    self._away[who] = (early, self._clock_ns() + AWAY_NS)

    def _lose(self, node: KnownNode) -> None:
        """Under the lock."""
        self._losses += 1
        self._lost[node.name] = self._losses
