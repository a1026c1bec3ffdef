"""Background poller of the console: keeps the last document, the history and the events of a cluster.

After a failed poll the last document stays, with a banner, until a later poll succeeds. A source whose polls are expensive may slow them
down while no page is open.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvstore.console.banners import ERROR, INFO, Banners, unreachable
from kvstore.console.config import ConsoleSettings
from kvstore.console.events import ClusterEvent, ClusterEventLog, audited_event, differences, first
from kvstore.console.history import History
from kvstore.console.model import KEPT, NODE_KEPT, ConsoleModel, Document, figures, node_figures
from kvstore.console.source import ConsoleSource
from kvstore.console.tenants import nearest
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Denied, KVStoreError

log = logging.getLogger("kvstore.console")

MAX_AUDITED: Final = 100
"""Most entries of the audit trail in one poll."""
MAX_SHARE: Final = 0.05
"""Share of a processor for polls: a very large cluster is polled less often, so that the master keeps serving."""
STOP_S: Final = 10.0
"""Time for a poll under way to end."""
WATCHED_S: Final = 30.0
"""A reader of the state counts as watching for this long."""


class ClusterWatcher:
    """Polls a ConsoleSource in a thread of its own. Thread-safe; `poll` is for that thread, and for tests."""

    def __init__(
        self,
        source: ConsoleSource,
        settings: ConsoleSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rest_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Does not poll before `start`. `rest_s`: returns the additional pause after a poll while no page is open."""
        self.source, self.settings = source, settings
        self._rest_s = rest_s
        self._rested_s = 0.0
        """Pause before the last poll."""
        self._watched_until_s = 0.0
        self.clock, self._wall = clock, wall
        self._model = ConsoleModel()
        self._history = History(
            KEPT,
            NODE_KEPT,
            span_s=settings.history_s,
            interval_s=settings.interval_s,
            node_interval_s=settings.node_interval_s,
            max_nodes=settings.max_nodes,
        )
        self._events = ClusterEventLog(settings.max_events)
        self._document: Document | None = None
        self._audited: int | None = 0
        """Number of the last audit entry that was read; None: this console has no permission for the audit trail."""
        self._status = pb.StatusReply()
        self._failure = ""
        self._unreachable = Banners()
        self._banner: dict[str, Any] | None = None
        """Banner of the failure."""
        self._version = 0
        self._encoded = b""
        self._listeners: set[Callable[[], None]] = set()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._is_watched = threading.Event()
        """Ends the pause of `_rest`; also set by `close`."""
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, *, wait_s: float = STOP_S) -> None:
        """Stop polling, and wait at most `wait_s` for a poll under way. Idempotent."""
        with self._lock:
            self._is_closed.set()
            self._is_watched.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def poll(self) -> None:
        """Poll the source, update the document, and call the listeners."""
        try:
            status, missing, age_s = self.source.snapshot()
            audited = self._newly_audited()
        except KVStoreError as error:
            self._fail(str(error))
        else:
            self._status = status
            self._take(self._model.document(status, at_s=self.clock(), wall_s=self._wall(), missing=missing, age_s=age_s), audited)
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` in the polling thread after each poll. Returns the function that removes it."""
        self._mark_watched()
        with self._lock:
            self._listeners.add(listener)

        def stop() -> None:
            with self._lock:
                self._listeners.discard(listener)

        return stop

    def state(self) -> bytes:
        """Return the last document and the state of polling as JSON. Ends a pause, so that the next read has a newer document."""
        self._mark_watched()
        with self._lock:
            if not self._encoded:
                about = {"version": self._version, "interval_s": self.settings.interval_s, "failure": self._failure}
                about |= {"banner": self._banner, "time_s": self._wall()}
                self._encoded = json.dumps({**about, "cluster": self._document}, separators=(",", ":")).encode()
            return self._encoded

    def tenants(self) -> list[dict[str, Any]]:
        """Return the most used limit of each tenant, as of the last poll."""
        return nearest(self._status)

    def events(self, after: int) -> list[dict[str, Any]]:
        """Return the events after number `after`."""
        with self._lock:
            return self._events.after(after)

    def history(self, node: str, samples: int) -> dict[str, Any]:
        """Return the newest samples of a node, or of the cluster ("")."""
        with self._lock:
            return self._history.node(node, samples) if node else self._history.cluster(samples)

    def _run(self) -> None:
        due_s = self.clock()
        while not self._is_closed.is_set():
            begun_s = time.thread_time()
            try:
                self.poll()
            except Exception:  # a dead thread would leave the page frozen without notice
                log.exception("polling the cluster for the console failed")
            rest_s = (time.thread_time() - begun_s) / MAX_SHARE
            due_s = max(due_s + self.settings.interval_s, self.clock() + rest_s)
            self._is_closed.wait(due_s - self.clock())
            self._rest()

    def _rest(self) -> None:
        """Pause for `rest_s` unless a page is open or opens meanwhile."""
        begun_s = self.clock()
        with self._lock:
            if not (self._listeners or begun_s < self._watched_until_s or self._is_closed.is_set()):
                self._is_watched.clear()
        self._is_watched.wait(self._rest_s())
        self._rested_s = self.clock() - begun_s

    def _mark_watched(self) -> None:
        with self._lock:
            self._watched_until_s = self.clock() + WATCHED_S
            self._is_watched.set()

    def _newly_audited(self) -> Sequence[pb.AuditEntry]:
        """Audit entries since the last poll, at most the newest MAX_AUDITED; empty without permission."""
        if self._audited is None:
            return ()
        try:
            entries = self.source.audit(self._audited)
        except Denied:
            self._audited = None
            return ()
        if entries:
            self._audited = entries[-1].number
        return entries[-MAX_AUDITED:]

    def _take(self, document: Document, audited: Sequence[pb.AuditEntry]) -> None:
        with self._lock:
            for entry in audited:
                self._events.add(audited_event(entry), entry.time_s)
            before, self._document = self._document, document
            events = list(differences(before, document)) if before else list(first(document))
            if self._failure:
                events.append(ClusterEvent(INFO, "", "The cluster answers again"))
            self._failure, self._banner = "", None
            self._unreachable.of((), self._wall())
            if before:  # the first document has no rates
                self._history.add(self.clock(), figures(document), node_figures(document), rested_s=self._rested_s)
            self._publish(events)

    def _fail(self, failure: str) -> None:
        with self._lock:
            events = [] if self._failure else [ClusterEvent(ERROR, "", f"The cluster does not answer: {failure}")]
            self._failure = failure
            (self._banner,) = self._unreachable.of([unreachable(failure)], self._wall())
            self._publish(events)

    def _publish(self, events: list[ClusterEvent]) -> None:
        for event in events:
            self._events.add(event, self._wall())
        self._version += 1
        self._encoded = b""
