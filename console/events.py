"""Event log of the console: nodes that join, die, return or drain, and changes of owners, derived from successive documents. Sans-I/O."""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kvstore.console.banners import ERROR, INFO, WARNING
from kvstore.console.model import NODE_FIELDS, Document
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.audit_lines import DONE, line_of
from kvstore.protocol.node_states import NOT_RUNNING

MAX_AT_ONCE: Final = 20
"""Most events of one kind between two polls; more (a rack that fails) become a single line."""
_NAME, _STATE, _DRAIN, _HEALTH = map(NODE_FIELDS.index, ("name", "state", "drain", "health"))


class ClusterEvent(NamedTuple):
    """An event in words. `subject` is the node's name, or "" for the cluster."""

    level: str
    subject: str
    text: str


class ClusterEventLog:
    """The last `limit` events. Not thread-safe.

    Event numbers ascend and start from the time of day, so those of a restarted process are higher, and a page that was connected to the
    old process receives them.
    """

    def __init__(self, limit: int) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=limit)
        self.last = 0
        """Number of the newest event; 0 for none."""

    def add(self, event: ClusterEvent, wall_s: float) -> None:
        self.last = max(self.last + 1, int(wall_s * 1000))
        self._events.append({"number": self.last, "time_s": wall_s, **event._asdict()})

    def after(self, number: int) -> list[dict[str, Any]]:
        """Return the kept events with a number above `number`."""
        return [event for event in self._events if event["number"] > number]


def audited_event(entry: pb.AuditEntry) -> ClusterEvent:
    """Return the event of an entry of the audit trail."""
    kind, _, name = entry.target.partition(" ")
    return ClusterEvent(INFO if entry.result == DONE else WARNING, name if kind == "node" else "", line_of(entry))


def differences(before: Document, after: Document) -> Iterator[ClusterEvent]:
    """Yield the events between two documents of one cluster."""
    yield from _of_master(before, after)
    if "following" in (before["master"]["role"], after["master"]["role"]):
        return  # a follower has no nodes in its status
    former, now = _by_name(before), _by_name(after)
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, row in now.items():
        for level, what in _of_node(former.get(name), row):
            kinds.setdefault((level, what), []).append(name)
    for name in former.keys() - now.keys():
        kinds.setdefault((INFO, "is forgotten"), []).append(name)
    for (level, what), names in kinds.items():
        if len(names) > MAX_AT_ONCE:
            yield ClusterEvent(level, "", f"{len(names)} nodes, {names[0]} among them: each {what}")
        else:
            yield from (ClusterEvent(level, name, f"{name} {what}") for name in sorted(names))


def _by_name(document: Document) -> dict[str, list[Any]]:
    return {row[_NAME]: row for row in document["nodes"]["rows"]}


def _of_master(before: Document, after: Document) -> Iterator[ClusterEvent]:
    owner, former = after["master"]["owner"], before["master"]["owner"]
    partitions = after["catalog"]["partitions"]
    if partitions > 1:
        own, did = after["catalog"]["shares"], before["catalog"]["shares"]
        for name in sorted(own.keys() | did.keys()):
            if own.get(name, 0) != did.get(name, 0):
                yield ClusterEvent(INFO if own.get(name) else WARNING, "", f"{name} owns {own.get(name, 0)} of {partitions} partitions")
    elif owner != former:
        if owner["name"]:
            yield ClusterEvent(WARNING if former["name"] else INFO, "", f"{owner['name']} owns the catalog, epoch {owner['epoch']}")
        else:
            yield ClusterEvent(ERROR, "", "No master owns the catalog")
    health, was = after["catalog"]["health"], before["catalog"]["health"]
    if health != was:
        yield ClusterEvent(INFO if health == "ok" else ERROR, "", f"Catalog: {health}")


def _of_node(before: list[Any] | None, row: list[Any]) -> Iterator[tuple[str, str]]:
    state, was = row[_STATE], before[_STATE] if before else None
    if state != was:
        yield from _STATES.get((was in NOT_RUNNING or was is None, state), ())
    if before is None:
        return
    if row[_DRAIN] != before[_DRAIN]:
        yield INFO, {"": "accepts blocks again", "draining": "is being drained", "drained": "is drained: it can be stopped"}[row[_DRAIN]]
    if row[_HEALTH] != before[_HEALTH]:
        yield (WARNING, f"has a failed tier, {row[_HEALTH]}") if row[_HEALTH] else (INFO, "has no failed tier any more")


_STATES: Final = {
    (True, "alive"): ((INFO, "has joined and is in sync"),),
    (True, "syncing"): ((INFO, "has joined and is resyncing its inventory"),),
    (True, "dead"): ((INFO, "is in the catalog, and dead"),),
    (True, "stopped"): ((INFO, "has stopped"),),
    (False, "stopped"): ((INFO, "has stopped"),),
    (False, "dead"): ((ERROR, "is dead"),),
    (False, "alive"): ((INFO, "is in sync"),),
    (False, "syncing"): ((INFO, "has registered again and is resyncing its inventory"),),
}
"""(was away or unknown, state now) -> events."""


def first(document: Document) -> Iterator[ClusterEvent]:
    """Yield the first events of a log, from the first document."""
    totals, owner = document["totals"], document["master"]["owner"]
    yield ClusterEvent(INFO, "", f"The console has started: {totals['alive']} of {totals['nodes']} nodes are alive")
    yield from itertools.islice(
        (ClusterEvent(WARNING, row[_NAME], f"{row[_NAME]} is dead") for row in document["nodes"]["rows"] if row[_STATE] == "dead"),
        MAX_AT_ONCE,
    )
    partitions = document["catalog"]["partitions"]
    for name, count in document["catalog"]["shares"].items():
        yield ClusterEvent(INFO, "", f"{name} owns {count} of {partitions} partitions")
    if owner["name"] and partitions == 1:
        yield ClusterEvent(INFO, "", f"{owner['name']} owns the catalog, epoch {owner['epoch']}")
