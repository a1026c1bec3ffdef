"""Periodic tasks of a node: expiry, heartbeats to local clients, flushes, retries of queued requests.

They act on the parts of storage.py. Heartbeats to masters are in master_session/.
"""

from collections.abc import Callable

from kvstore.rpc.reactor import Reactor
from kvstore.store.metrics import NodeMetrics
from kvstore.store.session_authenticator import SessionAuthenticator
from kvstore.store.storage import Storage
from kvstore.telemetry.metrics.requests import ROTATE_S

EXPIRE_INTERVAL_S = 0.1
"""Interval at which leases, open puts and queued requests are checked for expiry."""
HEARTBEAT_INTERVAL_S = 0.02
"""Interval of the heartbeat in shared-memory indexes and of draining local clients' accesses."""
FLUSH_INTERVAL_S = 1.0
"""Interval at which queued deletions are flushed in tiers without other writes."""
PEERS_INTERVAL_S = 1.0
"""Interval of the check for idle transfer peers: see `peer_ttl_s`."""
TICKETS_INTERVAL_S = 1.0
"""Interval of the check for expired sessions."""


class NodePeriodicTasks:
    """Schedules the periodic tasks. All run in the reactor's loop."""

    def __init__(self, reactor: Reactor, storage: Storage, metrics: NodeMetrics, authenticator: SessionAuthenticator) -> None:
        self._reactor = reactor
        self._storage = storage
        self._metrics = metrics
        self._authenticator = authenticator
        self._is_heartbeat_queued = False
        """A repeated heartbeat is queued; there is at most one."""

    def start(self) -> None:
        reactor, storage = self._reactor, self._storage
        reactor.after_events += [
            storage.drainer.step,
            storage.mover.start_moves,
            storage.replicators.flush,
            storage.commit_batcher.flush,
            storage.victim_queries.step,
        ]
        reactor.every(EXPIRE_INTERVAL_S, self._run_due)
        reactor.every(ROTATE_S, self._metrics.requests.rotate)
        reactor.every(HEARTBEAT_INTERVAL_S, self._heartbeat)
        reactor.every(FLUSH_INTERVAL_S, storage.mover.flush)
        reactor.every(FLUSH_INTERVAL_S, storage.reads.trim_memory)
        reactor.every(PEERS_INTERVAL_S, self._forget_peers)
        reactor.every(TICKETS_INTERVAL_S, self._authenticator.expire)

    def _run_due(self) -> None:
        storage, now_ns = self._storage, self._reactor.now_ns()
        work: list[Callable[[], object]] = [
            lambda: storage.leases.expire(now_ns=now_ns),
            lambda: storage.table.expire(now_ns=now_ns),
            storage.table.retired.step,
            storage.socket_puts.expire,
            lambda: storage.commit_waits.expire(now_ns=now_ns),
            lambda: storage.waiting.expire(now_ns=now_ns),
            lambda: storage.reads.expire(now_ns=now_ns),
            storage.waiting.retry,  # sent answers release their blocks without a retry
            storage.replica_queue.step,
            lambda: storage.expected_prefetches.step(now_ns),
            storage.prefetcher.step,
            storage.shared_index.release_unprotected,
            storage.drainer.run_due,
            storage.victim_queries.run_due,
            lambda: self._metrics.sample(storage.table, now_ns),
        ]
        if storage.regions is not None:
            work.append(storage.regions.close_stale)
        for part in work:  # an exception in one does not stop the others
            self._reactor.guarded(part)

    def _heartbeat(self) -> None:
        """Write the heartbeat and drain accesses; repeat at once while work is left."""
        shared_index = self._storage.shared_index
        is_more = shared_index.heartbeat(self._reactor.now_ns())
        is_more |= shared_index.take_accesses(self._storage.table.record_local_reads)
        if is_more and not self._is_heartbeat_queued:
            self._is_heartbeat_queued = True
            self._reactor.call_soon(self._heartbeat_again)

    def _heartbeat_again(self) -> None:
        self._is_heartbeat_queued = False
        self._heartbeat()

    def _forget_peers(self) -> None:
        engine = self._storage.engine
        if engine is not None and engine.peers():
            self._storage.mover.run_in_reader(engine.forget_idle)
