"""Audit trail of one master: each change and each refused login becomes a log line, a count and an entry of the catalog.

The owner of partition 0 keeps the entries of all masters in the catalog (directory/audit_log.py). Another master holds its own until
`deliver` takes them (forwarding.py); it holds the newest MAX_WAITING while no owner can be reached.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from kvstore.master.audit.change import LOGIN, Change, entry_of
from kvstore.master.audit.repeats import Repeats
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.audit_lines import DONE, FAILED, REFUSED, line_of
from kvstore.protocol.errors import Denied, KVStoreError
from kvstore.rpc.reactor import Reactor
from kvstore.security.actor import Actor
from kvstore.telemetry.logs import named

MAX_WAITING: Final = 1024
"""Entries that wait for an owner of the catalog; the oldest are dropped, and stay in the log."""

log = logging.getLogger("kvstore.audit")


class AuditTrail:
    """See the module. The loop is the only caller, except for `denied`, which any thread may call."""

    def __init__(self, reactor: Reactor, *, wall_s: Callable[[], float]) -> None:
        self.master = ""
        """Name of this master; to be set before the reactor runs."""
        self._reactor = reactor
        self._wall_s = wall_s
        self._waiting: deque[pb.AuditEntry] = deque(maxlen=MAX_WAITING)
        self._repeats = Repeats[tuple[Change, str]]()
        self._counts: Counter[tuple[str, ...]] = Counter()
        self.deliver: Callable[[Sequence[pb.AuditEntry]], bool] = lambda _entries: False
        """Adds entries to the catalog if this master owns partition 0; whether it did."""

    def done(self, change: Change) -> None:
        """The change is in force."""
        self._record(change, DONE)

    def failed(self, change: Change, error: BaseException) -> None:
        """It is not, because of `error`."""
        self._record(replace(change, detail=str(error)), REFUSED if isinstance(error, Denied) else FAILED)

    def repeated(self, change: Change, detail: str) -> None:
        """The change is in force, and is one of those that programs may make often: repeats within a minute are merged, whatever their
        `detail`."""
        self._merge(change, DONE, detail)

    def denied(self, actor: Actor, error: KVStoreError, *, action: str = LOGIN) -> None:
        """A credential was refused, or did not allow what was asked. Repeats within a minute are merged."""
        self._reactor.call_soon(lambda: self._merge(Change(actor, action), REFUSED, str(error)))

    def run_due(self, now_ns: int) -> None:
        """Report repeats whose minute is over, and deliver what waits."""
        for (change, result), count in self._repeats.due(now_ns):
            self._record(change, result, count)
        if self._waiting and self.deliver(self._waiting):
            self._waiting.clear()

    def take_waiting(self) -> list[pb.AuditEntry]:
        """Entries that the owner of partition 0, another master, is to get."""
        entries = list(self._waiting)
        self._waiting.clear()
        return entries

    def put_back(self, entries: Sequence[pb.AuditEntry]) -> None:
        """They did not reach it."""
        self._waiting = deque([*entries, *self._waiting], MAX_WAITING)

    def counts(self) -> dict[tuple[str, ...], float]:
        """By action and result."""
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
    """To the log, as event `audit`."""
    fields = {name: getattr(entry, name) for name in ("kind", "actor", "peer", "via", "action", "target", "old", "new", "result", "detail")}
    level = logging.INFO if entry.result == DONE else logging.WARNING
    log.log(level, "%s", line_of(entry), extra=named("audit", credential=entry.credential, count=entry.count, **fields))
