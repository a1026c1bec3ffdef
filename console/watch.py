"""Looks at a cluster again and again, in a thread of its own: the last document, its history and what happened, for any thread to read.

A source that cannot answer is asked again at the next look; until it does, the last document stays, with what is wrong. One that has to ask
others may have looks come less often while nobody wants to see them.
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
"""Entries of the audit trail taken in by one look."""
MAX_SHARE: Final = 0.05
"""Of a processor, for looks: of a very large cluster they come less often, so that a master goes on serving."""
STOP_S: Final = 10.0
"""For a look under way to end."""
WANTED_S: Final = 30.0
"""After somebody has read the state he is taken to look on for so long."""


class ClusterWatcher:
    """See the module. Thread-safe; `look` is for its own thread, and for tests."""

    def __init__(
        self,
        source: ConsoleSource,
        settings: ConsoleSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rest_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Nothing is asked before `start`. `rest_s`: how long after a look the next one comes at the earliest while nobody wants it."""
        self.source, self.settings = source, settings
        self._rest_s = rest_s
        self._rested_s = 0.0
        """Before the last look."""
        self._wanted_until_s = 0.0
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
        """Number of the last entry of the audit trail that was read; None: this console may not read it."""
        self._status = pb.StatusReply()
        self._failure = ""
        self._unreachable = Banners()
        self._banner: dict[str, Any] | None = None
        """Of the failure."""
        self._version = 0
        self._encoded = b""
        self._listeners: set[Callable[[], None]] = set()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._is_wanted = threading.Event()
        """It does not rest; also once it is closed."""
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, *, wait_s: float = STOP_S) -> None:
        """Look no more, and wait so long for a look under way. A second close is a no-op."""
        with self._lock:
            self._is_closed.set()
            self._is_wanted.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def look(self) -> None:
        """Ask the source, and tell who listens."""
        try:
            status, missing, age_s = self.source.look()
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
        """Have `listener` called in the watching thread after each look, until what is returned is called."""
        self._want()
        with self._lock:
            self._listeners.add(listener)

        def stop() -> None:
            with self._lock:
                self._listeners.discard(listener)

        return stop

    def state(self) -> bytes:
        """The last document as JSON, and how it came to be. While it rests another look comes at once, for who reads it again."""
        self._want()
        with self._lock:
            if not self._encoded:
                about = {"version": self._version, "interval_s": self.settings.interval_s, "failure": self._failure}
                about |= {"banner": self._banner, "time_s": self._wall()}
                self._encoded = json.dumps({**about, "cluster": self._document}, separators=(",", ":")).encode()
            return self._encoded

    def tenants(self) -> list[dict[str, Any]]:
        """How near tenants are to their quotas, as of the last look: made when it is asked for."""
        return nearest(self._status)

    def events(self, after: int) -> list[dict[str, Any]]:
        """What happened since event `after`."""
        with self._lock:
            return self._events.after(after)

    def history(self, node: str, samples: int) -> dict[str, Any]:
        """The newest samples of a node, or of the cluster ("")."""
        with self._lock:
            return self._history.node(node, samples) if node else self._history.cluster(samples)

    def _run(self) -> None:
        due_s = self.clock()
        while not self._is_closed.is_set():
            begun_s = time.thread_time()
            try:
                self.look()
            except Exception:  # a console that ends unseen shows what was for ever
                log.exception("a look at the cluster failed")
            rest_s = (time.thread_time() - begun_s) / MAX_SHARE
            due_s = max(due_s + self.settings.interval_s, self.clock() + rest_s)
            self._is_closed.wait(due_s - self.clock())
            self._rest()

    def _rest(self) -> None:
        """Until a look is wanted, or none was taken for long enough."""
        begun_s = self.clock()
        with self._lock:
            if not (self._listeners or begun_s < self._wanted_until_s or self._is_closed.is_set()):
                self._is_wanted.clear()
        self._is_wanted.wait(self._rest_s())
        self._rested_s = self.clock() - begun_s

    def _want(self) -> None:
        with self._lock:
            self._wanted_until_s = self.clock() + WANTED_S
            self._is_wanted.set()

    def _newly_audited(self) -> Sequence[pb.AuditEntry]:
        """Entries of the audit trail since the last look; at the first one the newest MAX_AUDITED. None for who may not read it."""
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
            happened = list(differences(before, document)) if before else list(first(document))
            if self._failure:
                happened.append(ClusterEvent(INFO, "", "The cluster answers again"))
            self._failure, self._banner = "", None
            self._unreachable.of((), self._wall())
            if before:  # the first look knows no rates
                self._history.add(self.clock(), figures(document), node_figures(document), rested_s=self._rested_s)
            self._told(happened)

    def _fail(self, failure: str) -> None:
        with self._lock:
            happened = [] if self._failure else [ClusterEvent(ERROR, "", f"The cluster does not answer: {failure}")]
            self._failure = failure
            (self._banner,) = self._unreachable.of([unreachable(failure)], self._wall())
            self._told(happened)

    def _told(self, happened: list[ClusterEvent]) -> None:
        for event in happened:
            self._events.add(event, self._wall())
        self._version += 1
        self._encoded = b""
