"""Audit trail of one master: each change and each refused login becomes a log line, a count and an entry of the
catalog.

The owner of partition 0 stores the entries of all masters in the catalog (directory/audit_log.py). Another master
queues its own, the newest MAX_WAITING; its `Forwarder` sends them to the owner from a thread of its own, since these
calls block. Repeats of one event are merged: the first is recorded at once, those of the next minute as one entry
with their count. A client that tries a wrong token a thousand times a second makes two entries a minute."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, NamedTuple, TypeVar

from kvstore.master.directory.audit_log import clip
from kvstore.master.peer_masters import PeerMasters
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.audit_lines import DONE, FAILED, REFUSED, line_of
from kvstore.protocol.errors import Closed, Denied, KVStoreError
from kvstore.rpc.reactor import Reactor
from kvstore.security.actor import Actor
from kvstore.telemetry.logs import named

LOGIN: Final = "login"
"""Action of a refused login."""
REQUEST: Final = "request"
"""Action of a refused message of a client or node that has logged in."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the cluster's state, for the audit trail. Fields without a value are "".

    `target` names the object ("tenant red", "node n1"); `old` and `new` are its values before and after; `detail` is
    the rest of the outcome."""

    actor: Actor
    action: str
    target: str = ""
    old: str = ""
    new: str = ""
    detail: str = ""


def entry_of(change: Change, result: str, *, master: str, time_s: float, count: int = 0) -> pb.AuditEntry:
    """Build an entry; the catalog numbers it. `count` is 0 for a change, and the number of occurrences for a merged
    event."""
    actor = change.actor
    return pb.AuditEntry(
        time_s=time_s,
        master=clip(master),
        kind=actor.kind,
        actor=clip(actor.name),
        credential=actor.credential,
        peer=clip(actor.peer),
        via=actor.via,
        action=change.action,
        target=clip(change.target),
        old=clip(change.old),
        new=clip(change.new),
        result=result,
        detail=clip(change.detail),
        count=count,
    )


K = TypeVar("K", bound=Hashable)
WINDOW_NS: Final = 60_000_000_000
MAX_KEYS: Final = 256
"""Different events in a window. Further ones are counted together, under the key of the last."""


@dataclass(slots=True)
class _Window:
    ends_ns: int
    repeats: int = 0


class RepeatFilter(Generic[K]):
    """Merges repeats of an event within WINDOW_NS. Not thread-safe."""

    def __init__(self) -> None:
        self._windows: dict[K, _Window] = {}
        """By event, the oldest window first."""
        self._others: K | None = None
        self._other_repeats = 0

    def is_first(self, key: K, now_ns: int) -> bool:
        """Return True if the event is to be recorded now. Otherwise count it for `due`."""
        window = self._windows.get(key)
        if window is not None:
            window.repeats += 1
            return False
        if len(self._windows) >= MAX_KEYS:
            self._others = key
            self._other_repeats += 1
            return False
        self._windows[key] = _Window(now_ns + WINDOW_NS)
        return True

    def due(self, now_ns: int) -> Iterator[tuple[K, int]]:
        """Yield the events whose window has ended, with their number of repeats (at least 1)."""
        for key, window in list(self._windows.items()):
            if window.ends_ns > now_ns:
                return
            del self._windows[key]
            if window.repeats:
                yield key, window.repeats
            if self._others is not None:
                other, count, self._others, self._other_repeats = self._others, self._other_repeats, None, 0
                yield other, count


MAX_WAITING: Final = 1024
"""Entries queued for the owner of the catalog. The oldest are dropped; the log has them."""

log = logging.getLogger("kvstore.audit")


class AuditTrail:
    """Records changes and refusals of one master. `denied` is thread-safe; the loop calls the rest."""

    def __init__(self, reactor: Reactor, *, wall_s: Callable[[], float]) -> None:
        self.master = ""
        """Name of this master; set before the reactor runs."""
        self._reactor = reactor
        self._wall_s = wall_s
        self._waiting: deque[pb.AuditEntry] = deque(maxlen=MAX_WAITING)
        self._repeats = RepeatFilter[tuple[Change, str]]()
        self._counts: Counter[tuple[str, ...]] = Counter()
        self.deliver: Callable[[Sequence[pb.AuditEntry]], bool] = lambda _entries: False
        """Add entries to the catalog; False if this master does not own partition 0."""

    def done(self, change: Change) -> None:
        """Record a change that is in force."""
        self._record(change, DONE)

    def failed(self, change: Change, error: BaseException) -> None:
        """Record a change that `error` prevented."""
        self._record(replace(change, detail=str(error)), REFUSED if isinstance(error, Denied) else FAILED)

    def repeated(self, change: Change, detail: str) -> None:
        """Record a change that programs make often. Repeats within a minute are merged, even if `detail` differs."""
        self._merge(change, DONE, detail)

    def denied(self, actor: Actor, error: KVStoreError, *, action: str = LOGIN) -> None:
        """Record a refused credential or request. Repeats within a minute are merged."""
        self._reactor.call_soon(lambda: self._merge(Change(actor, action), REFUSED, str(error)))

    def run_due(self, now_ns: int) -> None:
        """Record the repeats whose window has ended, and deliver queued entries."""
        for (change, result), count in self._repeats.due(now_ns):
            self._record(change, result, count)
        if self._waiting and self.deliver(self._waiting):
            self._waiting.clear()

    def take_waiting(self) -> list[pb.AuditEntry]:
        """Remove and return the queued entries, to be sent to the owner of partition 0."""
        entries = list(self._waiting)
        self._waiting.clear()
        return entries

    def put_back(self, entries: Sequence[pb.AuditEntry]) -> None:
        """Queue entries again that could not be sent."""
        self._waiting = deque([*entries, *self._waiting], MAX_WAITING)

    def counts(self) -> dict[tuple[str, ...], float]:
        """Return the number of entries by (action, result)."""
        return dict(self._counts)

    def _merge(self, change: Change, result: str, detail: str) -> None:
        if self._repeats.is_first((change, result), self._reactor.now_ns()):
            self._record(replace(change, detail=detail), result, 1)

    def _record(self, change: Change, result: str, count: int = 0) -> None:
        entry = entry_of(change, result, master=self.master, time_s=self._wall_s(), count=count)
        self._counts[entry.action, result] += max(1, count)
        write_line(entry)
        if not self.deliver([entry]):
            self._waiting.append(entry)


def write_line(entry: pb.AuditEntry) -> None:
    """Write the entry to the log, as event `audit`."""
    fields = {name: getattr(entry, name) for name in ("kind", "actor", "peer", "via", "action", "target", "old", "new", "result", "detail")}
    level = logging.INFO if entry.result == DONE else logging.WARNING
    log.log(level, "%s", line_of(entry), extra=named("audit", credential=entry.credential, count=entry.count, **fields))


INTERVAL_S: Final = 0.5
CALL_S: Final = 5.0
"""Deadline of one call."""
MAX_SENT: Final = 256
"""Entries of one message; with texts of 512 bytes it stays below gRPC's 4 MiB."""


class ForwardedEntries(NamedTuple):
    """Entries for the master whose frames address is `address`."""

    address: str
    entries: Sequence[pb.AuditEntry]


class Forwarder:
    """Thread that sends queued audit entries to the owner of partition 0. Started and closed by the master's thread."""

    def __init__(
        self, peer_masters: PeerMasters, take: Callable[[], ForwardedEntries | None], put_back: Callable[[Sequence[pb.AuditEntry]], None]
    ) -> None:
        """`take` returns entries and their receiver, or None; `put_back` queues unsent ones. Both run in this
        thread."""
        self._peer_masters = peer_masters
        self._take = take
        self._put_back = put_back
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit-forwarder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send no more. Does not join the thread, which may be waiting for the loop."""
        self._is_closed.set()

    def _run(self) -> None:
        was_reached = True
        while not self._is_closed.wait(INTERVAL_S):
            try:
                forwarded = self._take()
            except KVStoreError:  # the loop is busy or ends
                continue
            if forwarded is None:
                continue
            unsent = self._send(forwarded)
            if unsent and was_reached:
                log.warning("%d audit entries wait for the owner of the catalog, at %s", len(unsent), forwarded.address)
            was_reached = not unsent

    def _send(self, forwarded: ForwardedEntries) -> Sequence[pb.AuditEntry]:
        """Send the entries; put back and return those that were not received."""
        for begin in range(0, len(forwarded.entries), MAX_SENT):
            message = pb.AuditEntries(entries=forwarded.entries[begin : begin + MAX_SENT])
            try:
                self._peer_masters.call(forwarded.address, "RecordAudit", message, timeout_s=CALL_S)
            except KVStoreError:
                unsent = forwarded.entries[begin:]
                try:
                    self._put_back(unsent)
                except Closed:
                    log.warning("%d audit entries are in this log only: the master stops", len(unsent))
                return unsent
        return ()
