"""What a running node does again and again: expire what is over, tell its host's clients that it lives, go on with what waits.

Nothing here is begun by a request. It acts on what storage.py has made, and says nothing to masters: master_session.py does.
"""

from collections.abc import Callable

from kvstore.rpc.reactor import Reactor
from kvstore.store.metrics import NodeMetrics
from kvstore.store.session_authenticator import SessionAuthenticator
from kvstore.store.storage import Storage
from kvstore.telemetry.metrics.requests import ROTATE_S

TICK_S = 0.1
"""How often leases, open puts and waiting requests are looked at for their deadlines."""
BEAT_S = 0.02
"""How often the indexes say that the node lives, and what clients read by themselves is counted."""
FLUSH_INTERVAL_S = 1.0
"""How often queued deletions are written down in a tier that nothing else is written to."""
PEERS_INTERVAL_S = 1.0
"""How often nodes that this one has copied nothing from for long are looked for: see `peer_ttl_s`."""
TICKETS_INTERVAL_S = 1.0
"""How often sessions are looked at whose ticket may have ended."""


class NodePeriodicTasks:
    """See the module. All of it is done in the reactor's loop."""

    def __init__(self, reactor: Reactor, storage: Storage, measures: NodeMetrics, admission: SessionAuthenticator) -> None:
        self._reactor = reactor
        self._storage = storage
        self._measures = measures
        self._admission = admission
        self._beats_again = False
        """A beat is due at once, for there is more to do: of these there is one at a time, however often the clock comes round."""

    def start(self) -> None:
        reactor, storage = self._reactor, self._storage
        reactor.after_events += [
            storage.leaving.step,
            storage.mover.kick,
            storage.publishers.flush,
            storage.deciding.flush,
            storage.last_copies.step,
        ]
        reactor.every(TICK_S, self._tick)
        reactor.every(ROTATE_S, self._measures.requests.rotate)
        reactor.every(BEAT_S, self._beat)
        reactor.every(FLUSH_INTERVAL_S, storage.mover.flush)
        reactor.every(FLUSH_INTERVAL_S, storage.reads.tidy)
        reactor.every(PEERS_INTERVAL_S, self._forget_peers)
        reactor.every(TICKETS_INTERVAL_S, self._admission.expire)

    def _tick(self) -> None:
        storage, now_ns = self._storage, self._reactor.now_ns()
        work: list[Callable[[], object]] = [
            lambda: storage.leases.expire(now_ns=now_ns),
            lambda: storage.table.expire(now_ns=now_ns),
            storage.table.retired.step,
            storage.sent.expire,
            lambda: storage.answers.expire(now_ns=now_ns),
            lambda: storage.waiting.expire(now_ns=now_ns),
            lambda: storage.reads.expire(now_ns=now_ns),
            storage.waiting.retry,  # whatever made room: an answer that has been sent lets go of its blocks without a word
            storage.copies.step,
            storage.showing.sweep,
            storage.leaving.tick,
            storage.last_copies.tick,
            lambda: self._measures.tick(storage.table, now_ns),
        ]
        if storage.regions is not None:
            work.append(storage.regions.sweep)
        for part in work:  # each is done whatever another raises
            self._reactor.guarded(part)

    def _beat(self) -> None:
        """Clients of this host see that the node lives, and it sees what they read; at once again while there is more of that."""
        showing = self._storage.showing
        is_more = showing.beat(self._reactor.now_ns())
        is_more |= showing.take_accesses(self._storage.table.read_unasked)
        if is_more and not self._beats_again:
            self._beats_again = True
            self._reactor.call_soon(self._beat_again)

    def _beat_again(self) -> None:
        self._beats_again = False
        self._beat()

    def _forget_peers(self) -> None:
        engine = self._storage.engine
        if engine is not None and engine.peers():
            self._storage.mover.do_aside(engine.forget_idle)
