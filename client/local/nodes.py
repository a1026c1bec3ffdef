"""The local nodes that this client is attached to: shared-memory index, reader slots and mapped slabs of each.

Requests to nodes are sans-I/O (effects.py); reading the shared state sends nothing.

A node frees the reader slots, and what their views protect, when the connection that opened them ends. An unanswered
request also ends a connection. So that connection carries no request that a caller's deadline, cancellation or signal
could cut short: slabs are requested over other pooled connections, and a replacement index in the background.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from kvstore.client.connections.cluster_connections import ClusterConnections
from kvstore.client.connections.routes import KnownNode
from kvstore.client.connections.slabs import SlabMapping
from kvstore.client.core.effects import AcquireConnectionEffect, AnyConnectionLease, Operation, RequestFdsEffect, SpawnEffect
from kvstore.client.core.forks import ForkGeneration
from kvstore.client.local.reader_slots import LocalReaderSlots
from kvstore.client.local.shared_index import FOREVER_NS, SharedIndexReader
from kvstore.protocol.errors import Closed, DeadlineExceeded, Fenced, InvalidTicket, KVStoreError, ProtocolError, Unreachable
from kvstore.protocol.node_messages import OpenIndex
from kvstore.protocol.shared_index import AT_HEARTBEAT
from kvstore.rpc.deadline import Deadline

PROBE_NS: Final = 100_000_000
"""Heartbeat age at which the client checks whether the connection is closed. A node beats five times as often."""
STALE_NS: Final = 1_000_000_000
"""Heartbeat age at which a node's index is ignored: the node is stopped or starved, and may be dead to its master."""
RECHECK_NS: Final = 20_000_000
"""Interval at which the cached set of readable nodes is recomputed."""
ATTACH_S: Final = 1.0
ATTACH_DEADLINE_DIVISOR: Final = 4
"""An attach attempt takes at most this share of the call's deadline, and at most ATTACH_S."""
RETRY_FACTOR: Final = 10
"""An attach that failed is retried after this multiple of its duration, at least."""
RETRY_NS: Final = 1_000_000_000
"""Minimum interval between attempts to attach to missing nodes. With others attached, attempts run in the
background."""


class LocalNode:
    """One attached node: its index, this client's reader slots, the mapped slabs, and the connection that owns the
    slots."""

    def __init__(self, node: KnownNode, connection: AnyConnectionLease, index: SharedIndexReader, reader_slots: LocalReaderSlots) -> None:
        self.node_id, self.name = node.node_id, node.name
        self.daemon_id = node.route.daemon_id
        self.connection = connection
        self.index = index
        """Current index; the node may replace it by a larger one."""
        self.reader_slots = reader_slots
        self.epoch = connection.channel.welcome.epoch
        self.slabs: dict[int, memoryview] = {}
        """Mapped slabs by id, read-only."""
        self.slabs_gone = index.slabs_gone
        self._has_hung_up = False

    def is_fresh(self, now_ns: int) -> bool:
        """Return whether the index may be read: the heartbeat is recent, or the connection is still open."""
        age_ns = self.index.age_ns(now_ns)
        if age_ns < PROBE_NS and not self.reader_slots.is_over:
            return True
        if self._has_hung_up or age_ns == FOREVER_NS or self.reader_slots.is_over:
            return False
        self._has_hung_up = self.connection.channel.is_closed_by_peer()
        return not self._has_hung_up and age_ns < STALE_NS

    @property
    def fresh_until_ns(self) -> int:
        """Time until which a fresh node stays fresh without another check."""
        return self.index.words[AT_HEARTBEAT] + PROBE_NS

    @property
    def needs_request(self) -> bool:
        """Return whether the node's index was replaced, slabs were freed, or the node is lost."""
        return self.is_lost or self.index.is_over or self.slabs_gone != self.index.slabs_gone

    def prune(self, held: Iterable[int]) -> None:
        """Forget all mapped slabs but these."""
        kept = set(held)
        for slab in [slab for slab in self.slabs if slab not in kept]:
            self.slabs.pop(slab, None)

    @property
    def is_lost(self) -> bool:
        """Return whether the node's process ended or its connection closed: its index and the reader slots no longer count."""
        return self._has_hung_up or self.reader_slots.is_over

    def close(self) -> None:
        self.connection.discard()
        self.slabs.clear()


def _attempt_deadline(deadline: Deadline) -> Deadline:
    return deadline.part(min(ATTACH_S, deadline.left_s() / ATTACH_DEADLINE_DIVISOR))


class LocalNodes:
    """The attached nodes of one client. Threads and tasks share it; one at a time attaches. `ready` is replaced, never
    mutated."""

    def __init__(
        self, daemons: ClusterConnections, mapping: SlabMapping, *, is_used: bool = True, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Without `is_used`, no node is ever attached."""
        self._daemons = daemons
        self._mapping = mapping
        self.clock_ns = clock_ns
        self._attach_lock = threading.Lock()
        self._due_ns = 0
        self._retry_ns = 0
        """Time of the next attempt to attach to missing nodes."""
        self._is_outdated = False
        """A node did not match the master's description because it restarted: refresh the node table once more."""
        self._nodes_version = -1
        self._is_closed = not is_used
        self.process = ForkGeneration.number
        self._closed_counts = (0, 0, 0, 0)
        """Counters of reader slots that are closed."""
        self.ready: tuple[LocalNode, ...] = ()
        self.cached_fresh: tuple[int, tuple[LocalNode, ...]] = (0, ())
        """(valid until in ns, fresh nodes): a cache, because checking several words of each node in every call costs
        more than the read."""

    def fresh(self) -> tuple[LocalNode, ...]:
        """The nodes whose index may be read now; () in a forked child."""
        if self.process != ForkGeneration.number:
            return ()
        now_ns = self.clock_ns()
        return tuple(node for node in self.ready if node.is_fresh(now_ns))

    def refresh(self) -> bool:
        """Recompute the cached set. False: the caller must run `attach` first."""
        if self._may_find_more():
            return False
        self._update_cache()
        return True

    def is_due(self) -> bool:
        """Return whether `attach` may find more nodes; recomputes the cached set. For callers whose cached set has expired."""
        is_due = self._may_find_more()
        if is_due:
            self._due_ns = self.clock_ns() + RECHECK_NS
        self._update_cache()
        return is_due

    def _may_find_more(self) -> bool:
        if self._is_closed or self.clock_ns() < self._due_ns:
            return False
        is_current = self._nodes_version == self._daemons.nodes.version
        return not self.ready or not is_current or any(node.needs_request for node in self.ready) or self._is_retry_due()

    def _missing(self) -> list[KnownNode]:
        """Local nodes that are not attached. A restarted node is back without news from the master."""
        ready = {node.node_id for node in self.ready}
        return [known for known in self._daemons.nodes.local() if known.node_id not in ready]

    def _is_retry_due(self) -> bool:
        return self.clock_ns() >= self._retry_ns and (self._is_outdated or bool(self._missing()))

    def _update_cache(self) -> None:
        """Store the fresh nodes and the time until which they stay so."""
        fresh = self.fresh()
        self.cached_fresh = min([self.clock_ns() + RECHECK_NS, *(node.fresh_until_ns for node in fresh)]), fresh
        if self._is_closed:
            self.cached_fresh = FOREVER_NS, ()

    def attach(self, deadline: Deadline, *, waits: bool = False) -> Operation[None]:
        """Attach to the missing local nodes, as far as possible; failures are retried later. Returns at once if another
        thread attaches.

        With nodes attached already, the missing ones are retried in the background, unless `waits`.
        """
        if not self._attach_lock.acquire(blocking=False):
            return
        try:
            begun_ns = self.clock_ns()
            self._due_ns = begun_ns + RETRY_NS
            nodes = self._daemons.nodes
            if not nodes.is_known:
                yield from self._daemons.refresh_nodes(deadline)
            is_current = self._nodes_version == nodes.version
            self._nodes_version = nodes.version
            self._drop_lost()
            for node in self.ready:
                with suppress(KVStoreError):  # a node that died meanwhile is dropped next time
                    yield from self._unmap_freed(node, _attempt_deadline(deadline))
            if waits or not self.ready or not is_current:
                yield from self._attach_missing(deadline)
            took_ns = self.clock_ns() - begun_ns
            self._due_ns = begun_ns + max(RETRY_NS, RETRY_FACTOR * took_ns)
            if self.ready and not any(node.needs_request for node in self.ready):
                self._due_ns = 0  # nothing is missing: the next recheck notices changes
        except KVStoreError:
            return  # the request that follows reports the error
        finally:
            self._update_cache()
            self._attach_lock.release()
        if any(node.index.is_over for node in self.ready) or self._is_retry_due():
            with suppress(RuntimeError):  # no thread available: the next recheck tries again
                yield SpawnEffect(self._attach_in_background())

    def _attach_missing(self, deadline: Deadline) -> Operation[None]:
        begun_ns = self.clock_ns()
        if self._is_outdated:
            self._is_outdated = False
            with suppress(KVStoreError):
                yield from self._daemons.refresh_nodes(_attempt_deadline(deadline))
        for known in self._missing():
            with suppress(KVStoreError):
                yield from self._attach_to(known, _attempt_deadline(deadline))
        self._retry_ns = begun_ns + max(RETRY_NS, RETRY_FACTOR * (self.clock_ns() - begun_ns))

    def _attach_in_background(self) -> Operation[None]:
        """Open replaced indexes and attach to missing nodes. Yields to a call that attaches, and is retried after
        it."""
        if not self._attach_lock.acquire(blocking=False):
            self._due_ns = self.clock_ns() + RECHECK_NS
            return
        try:
            for node in self.ready:
                if node.index.is_over:
                    with suppress(KVStoreError):
                        node.index, _ = yield from self._open_index(node.connection, Deadline(ATTACH_S))
                        self._due_ns = min(self._due_ns, self.clock_ns() + RECHECK_NS)
            if self._is_retry_due():
                yield from self._attach_missing(Deadline(ATTACH_S * ATTACH_DEADLINE_DIVISOR))
        finally:
            self._update_cache()
            self._attach_lock.release()

    def map_slabs(self, node: LocalNode, slabs: Sequence[int], deadline: Deadline) -> Operation[None]:
        """Map these slabs as far as the deadline allows, and drop those that the node has freed. Returns at once if
        another thread attaches."""
        if not self._attach_lock.acquire(blocking=False):
            return
        try:
            share = _attempt_deadline(deadline)
            with (yield from self._acquire_other(node, share)) as connection:
                found = yield from self._mapping.map_slabs(connection.channel, node.node_id, slabs, share, writable=False)
            node.slabs.update(zip(slabs, (slab.memory for slab in found), strict=True))
            self._daemons.shm_diagnostics.shared(node.name)
        except KVStoreError as error:
            self._note_failure(node.name, node.connection, error)  # a get from that slab sends a request instead
        finally:
            node.prune(self._mapping.slabs.held(node.node_id, node.epoch))
            self._attach_lock.release()

    def _note_failure(self, node: str, connection: AnyConnectionLease, error: BaseException) -> None:
        """Record why shared memory is not used, if the node answers and refuses or its memory cannot be mapped.

        Transient errors (slow, stopping, or a freed slab) are not recorded.
        """
        is_passing = isinstance(error, Unreachable | DeadlineExceeded | Fenced | Closed)
        if isinstance(error, KVStoreError) and not is_passing and connection.channel.is_open:
            self._daemons.shm_diagnostics.note(node, str(error))

    def _unmap_freed(self, node: LocalNode, deadline: Deadline) -> Operation[None]:
        """Unmap the slabs that the node has freed."""
        gone = node.index.slabs_gone
        if node.slabs_gone != gone:
            with (yield from self._acquire_other(node, deadline)) as connection:
                yield from self._mapping.unmap_freed(connection.channel, node.node_id, deadline)
            node.slabs_gone = gone
            node.prune(self._mapping.slabs.held(node.node_id, node.epoch))

    def _acquire_other(self, node: LocalNode, deadline: Deadline) -> Operation[AnyConnectionLease]:
        """Acquire a connection to the same process, other than the one of the reader slots. Raises Unreachable."""
        known = self._daemons.nodes.get(node.node_id)
        if known is None or not known.route.is_local:
            raise Unreachable(f"node {node.name!r} is not among the live nodes of this host")
        connection = yield from self._acquire(known, deadline)
        if connection.channel.welcome.epoch != node.epoch:
            connection.discard()
            raise Unreachable(f"node {node.name!r} has restarted")
        return connection

    def _acquire(self, node: KnownNode, deadline: Deadline) -> Operation[AnyConnectionLease]:
        address = node.route.address()
        try:
            connection: AnyConnectionLease = yield AcquireConnectionEffect(address, deadline, node.route.hello)
        except InvalidTicket:  # the ticket has expired, or the node has restarted
            yield from self._daemons.refresh_nodes(deadline)
            self._is_outdated = self._daemons.nodes.get(node.node_id) is None  # the node has not registered yet
            connection = yield AcquireConnectionEffect(address, deadline, node.route.hello)
        if not node.route.is_meant(address, connection.channel.welcome):
            connection.discard()
            self._is_outdated = True
            raise Unreachable(f"another daemon listens at {address} now")
        return connection

    def _attach_to(self, node: KnownNode, deadline: Deadline) -> Operation[None]:
        connection = yield from self._acquire(node, deadline)
        try:
            found = LocalNode(node, connection, *(yield from self._open_index(connection, deadline)))
            if self._is_closed:
                raise Closed("the client is closed")
            self.ready = (*self.ready, found)
            self._daemons.shm_diagnostics.shared(node.name)
        except BaseException as error:
            self._note_failure(node.name, connection, error)
            connection.discard()
            raise

    def _open_index(self, connection: AnyConnectionLease, deadline: Deadline) -> Operation[tuple[SharedIndexReader, LocalReaderSlots]]:
        """Open the current index and the connection's reader slots. Raises ProtocolError, Broken."""
        answer, fds = yield RequestFdsEffect(connection.channel, OpenIndex(), deadline)
        try:
            if len(fds) != 2:
                raise ProtocolError(f"the node sent {len(fds)} descriptors instead of 2 (index, reader slots)")
            return SharedIndexReader(fds[0], answer.sizes[0]), LocalReaderSlots(fds[1], answer.sizes[1])
        finally:
            for fd in fds:
                os.close(fd)

    def _drop_lost(self) -> None:
        """Close lost nodes, and those that the master no longer names. A new leader that names none yet does not
        count."""
        nodes = self._daemons.nodes
        known = {(node.node_id, node.route.daemon_id) for node in nodes.local()}
        lost = [node for node in self.ready if node.is_lost or (nodes.is_known and (node.node_id, node.daemon_id) not in known)]
        self.ready = tuple(node for node in self.ready if node not in lost)
        for node in lost:
            self._close_node(node)

    def counts(self) -> tuple[int, int, int, int]:
        """(local calls, blocks read, bytes read, blocks that nodes refused to hold)."""
        found = self._closed_counts
        for node in self.ready:
            found = _add_counts(found, node.reader_slots)
        return found

    def _close_node(self, node: LocalNode) -> None:
        """Close a node that is no longer ready. Its reader slots live on until the last view closes."""
        self._closed_counts = _add_counts(self._closed_counts, node.reader_slots)
        node.close()

    def close(self) -> None:
        """Close all connections. A second close is a no-op."""
        self._is_closed = True
        ready, self.ready, self.cached_fresh = self.ready, (), (FOREVER_NS, ())
        for node in ready:
            self._close_node(node)


def _add_counts(counts: tuple[int, int, int, int], reader_slots: LocalReaderSlots) -> tuple[int, int, int, int]:
    """Add the counters of one node's reader slots."""
    calls, hits, bytes_in, unheld = counts
    return calls + reader_slots.calls, hits + reader_slots.hits, bytes_in + reader_slots.bytes_in, unheld + reader_slots.unheld
