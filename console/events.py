"""What happened: who came, died, returned, was drained or took over, told from one document of the cluster to the next. Sans-I/O."""

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
"""Events of one kind told one by one between two looks; of more there is one line: a rack that goes is one thing."""
_NAME, _STATE, _DRAIN, _HEALTH = map(NODE_FIELDS.index, ("name", "state", "drain", "health"))


class ClusterEvent(NamedTuple):
    """`subject` is the node's name, or "" for the cluster."""

    level: str
    subject: str
    text: str


class ClusterEventLog:
    """The last `limit` events. Each has a number, higher than those before it, of its time: so a page that saw those of a process that was
    started again is behind the new one's, and hears of them. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=limit)
        self.last = 0
        """The number of the newest; 0 for none."""

    def add(self, event: ClusterEvent, wall_s: float) -> None:
        self.last = max(self.last + 1, int(wall_s * 1000))
        self._events.append({"number": self.last, "time_s": wall_s, **event._asdict()})

    def after(self, number: int) -> list[dict[str, Any]]:
        """Those that are newer than `number`, and not forgotten."""
        return [event for event in self._events if event["number"] > number]


def audited_event(entry: pb.AuditEntry) -> ClusterEvent:
    """An entry of the audit trail."""
    kind, _, name = entry.target.partition(" ")
    return ClusterEvent(INFO if entry.result == DONE else WARNING, name if kind == "node" else "", line_of(entry))


def differences(before: Document, after: Document) -> Iterator[ClusterEvent]:
    """What has happened between two looks at one cluster."""
    yield from _of_master(before, after)
    if "following" in (before["master"]["role"], after["master"]["role"]):
        return  # one that follows knows no nodes: they neither went nor came
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
            yield ClusterEvent(ERROR, "", "Nobody owns the catalog")
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
        yield INFO, {"": "takes blocks again", "draining": "is being drained", "drained": "is drained: it can be stopped"}[row[_DRAIN]]
    if row[_HEALTH] != before[_HEALTH]:
        yield (WARNING, f"has a tier that failed, {row[_HEALTH]}") if row[_HEALTH] else (INFO, "has no failed tier any more")


_STATES: Final = {
    (True, "alive"): ((INFO, "has come, and told what it has"),),
    (True, "syncing"): ((INFO, "has come, and tells what it has"),),
    (True, "dead"): ((INFO, "is known of, and dead"),),
    (True, "stopped"): ((INFO, "has stopped"),),
    (False, "stopped"): ((INFO, "has stopped"),),
    (False, "dead"): ((ERROR, "is dead"),),
    (False, "alive"): ((INFO, "has told what it has"),),
    (False, "syncing"): ((INFO, "has returned, and tells what it has"),),
}
"""By whether it was away or unknown, and by what it is now."""


def first(document: Document) -> Iterator[ClusterEvent]:
    """What a log begins with, for nobody knows what was before."""
    totals, owner = document["totals"], document["master"]["owner"]
    yield ClusterEvent(INFO, "", f"The console began to look: {totals['alive']} of {totals['nodes']} nodes are alive")
    yield from itertools.islice(
        (ClusterEvent(WARNING, row[_NAME], f"{row[_NAME]} is dead") for row in document["nodes"]["rows"] if row[_STATE] == "dead"),
        MAX_AT_ONCE,
    )
    partitions = document["catalog"]["partitions"]
    for name, count in document["catalog"]["shares"].items():
        yield ClusterEvent(INFO, "", f"{name} owns {count} of {partitions} partitions")
    if owner["name"] and partitions == 1:
        yield ClusterEvent(INFO, "", f"{owner['name']} owns the catalog, epoch {owner['epoch']}")
