"""Invariants of the clients' journals (journal.py) that hold under every fault of the cluster.

- Bytes are those of a version of the requested key. Each reader checks it, since a value contains its key and version.
- A version is readable from the beginning of its put. A read that begins after its end does not return it. The end is its acknowledged
  removal, or the acknowledged put of a later version.
- While the cluster is disturbed, or a node is unreachable, a removal reaches only the reachable nodes. It counts from the first quiet
  moment on. A version that was *replaced* at that time may return (docs/promises.md).
- An acknowledged block is found while the cluster is quiet, provided that a node known to hold it was neither killed nor evicted any block
  since. With ack="node", its own writer finds it.
- No call exceeds its deadline and a grace, not counting the time in which the caller itself was stopped.
- The only errors are those with an external cause.

Lost replies, misses and failures are all allowed, so the share that succeeded is reported, too.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tests.faults.journal import ACKS, Act, BlockName, Outcome

MAX_EXAMPLES: Final = 5
"""Examples that are reported for each kind of violation."""
Interval = tuple[int, int]


class Times:
    """Intervals [begin, end] of time in nanoseconds, merged."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        merged: list[list[int]] = []
        for begin, end in sorted(intervals):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        self._begins = [begin for begin, _ in merged]
        self._ends = [end for _, end in merged]

    def __iter__(self) -> Iterator[Interval]:
        return zip(self._begins, self._ends, strict=True)

    def meet(self, begin: int, end: int) -> bool:
        """Return whether one of the intervals intersects [begin, end]."""
        at = bisect.bisect_right(self._begins, end) - 1
        return at >= 0 and self._ends[at] >= begin

    def over(self, moment: int) -> int:
        """The first moment from then on that lies in none."""
        at = bisect.bisect_right(self._begins, moment) - 1
        return moment if at < 0 or self._ends[at] < moment else self._ends[at] + 1

    def shared(self, begin: int, end: int) -> int:
        """Return how much of [begin, end] the intervals cover."""
        return sum(max(0, min(end, e) - max(begin, b)) for b, e in zip(self._begins, self._ends, strict=True))


@dataclass(slots=True)
class Circumstances:
    """Faults and disturbances of the cluster."""

    disturbed: Times
    """From each fault until all that it touched was there again, and the master had heard of all; and whenever it was not at rest."""
    lost: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By node, the times at which it lost what only its memory held, or had evicted something."""
    stopped: Mapping[int, Times] = field(default_factory=dict)
    """By writer, when it could not run."""
    deadline_ns: int = 0
    grace_ns: int = 0


@dataclass(slots=True)
class Verdict:
    acknowledged: int = 0
    """Operations that ended without an error."""
    failed: int = 0
    hits: int = 0
    misses: int = 0
    required: int = 0
    """Reads that had to find their block: those of which a miss would have been a violation."""
    longest_ns: int = 0
    violations: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def violate(self, kind: str, text: str) -> None:
        self.violations[kind] += 1
        if self.violations[kind] <= MAX_EXAMPLES:
            self.examples.append(f"{kind}: {text}")


@dataclass(slots=True)
class _Version:
    began_ns: int
    ended_ns: int | None = None
    """When its put was acknowledged."""
    ack: int = 0
    over_ns: int | None = None


@dataclass(slots=True)
class _Life:
    """Of one key."""

    versions: dict[int, _Version] = field(default_factory=dict)
    touched: list[int] = field(default_factory=list)
    """When puts and removals of it began."""
    located: list[tuple[int, int]] = field(default_factory=list)
    """(when, mask of nodes)."""


class Judge:
    """Of journals by their writer: (writer, its records)."""

    def __init__(self, journals: Sequence[tuple[int, Any]], circumstances: Circumstances) -> None:
        self._journals = journals
        self._told = circumstances
        self._lives: dict[int, _Life] = defaultdict(_Life)
        self.verdict = Verdict()
        for _, records in journals:
            self._take_writes(records[np.isin(records["act"], (Act.PUT, Act.REMOVE, Act.LOCATE))])

    def judge(self, *, since_ns: int = 0) -> Verdict:
        """Of all that ended from then on; beginnings of it count, whenever they were."""
        for writer, records in self._journals:
            ended = records[(records["ended_ns"] >= max(since_ns, 1))]
            self._count(writer, ended)
            for row in ended[ended["act"] == Act.GET].tolist():
                self._check_read(writer, *row)
        return self.verdict

    # --- what was written ---

    def _take_writes(self, records: Any) -> None:
        for act, outcome, ack, version, block, began_ns, ended_ns in records.tolist():
            life = self._lives[block]
            if act == Act.LOCATE:
                life.located.append((ended_ns, version))
            elif outcome == Outcome.BEGUN:
                life.touched.append(began_ns)
                if act == Act.PUT:
                    life.versions[version] = _Version(began_ns)
            elif outcome == Outcome.DONE and act == Act.PUT:
                put = life.versions[version]
                put.ended_ns, put.ack = ended_ns, ack
                if not self._told.disturbed.meet(began_ns, ended_ns):
                    self._end(life, version, ended_ns)
            elif outcome == Outcome.DONE:
                self._end(life, None, self._told.disturbed.over(ended_ns) if self._told.disturbed.meet(began_ns, ended_ns) else ended_ns)

    def _end(self, life: _Life, before: int | None, over_ns: int) -> None:
        """Of the versions that were acknowledged; the others may still take effect."""
        for number, version in life.versions.items():
            if version.over_ns is None and version.ended_ns is not None and (before is None or number < before):
                version.over_ns = over_ns

    # --- what was read ---

    def _count(self, writer: int, ended: Any) -> None:
        verdict, told = self.verdict, self._told
        verdict.acknowledged += int(np.isin(ended["outcome"], (Outcome.DONE, Outcome.ABSENT)).sum())
        verdict.failed += int((ended["outcome"] == Outcome.FAILED).sum())
        for kind, outcome in (("wrong bytes", Outcome.WRONG), ("unexpected error", Outcome.UNEXPECTED)):
            for row in ended[ended["outcome"] == outcome].tolist():
                verdict.violate(kind, f"{Act(row[0]).name} of {BlockName.unpacked(row[4]).key!r} by client {writer}: see its log")
        took_ns = ended["ended_ns"] - ended["began_ns"]
        if len(took_ns):
            verdict.longest_ns = max(verdict.longest_ns, int(took_ns.max()))
        for row in ended[took_ns > told.deadline_ns + told.grace_ns].tolist() if told.deadline_ns else ():
            act, began_ns, ended_ns = row[0], row[5], row[6]
            stopped = told.stopped.get(writer)
            if ended_ns - began_ns - (stopped.shared(began_ns, ended_ns) if stopped else 0) > told.deadline_ns + told.grace_ns:
                verdict.violate("beyond its deadline", f"{Act(act).name} by client {writer} took {(ended_ns - began_ns) / 1e9:.2f} s")

    def _check_read(self, writer: int, _act: int, outcome: int, _ack: int, version: int, block: int, began_ns: int, ended_ns: int) -> None:
        life, name = self._lives.get(block), BlockName.unpacked(block)
        if outcome == Outcome.DONE:
            self.verdict.hits += 1
            found = life.versions.get(version) if life is not None else None
            if found is None or found.began_ns > ended_ns:
                self.verdict.violate("never put", f"version {version} of {name.key!r} was read before anybody began to put it")
            elif found.over_ns is not None and began_ns > found.over_ns:
                late_s = (began_ns - found.over_ns) / 1e9
                self.verdict.violate("stale", f"version {version} of {name.key!r} was over for {late_s:.3f} s when client {writer} asked")
        elif outcome == Outcome.ABSENT:
            self.verdict.misses += 1
        if outcome in (Outcome.DONE, Outcome.ABSENT) and life is not None and self._is_required(life, name, writer, began_ns, ended_ns):
            self.verdict.required += 1
            if outcome == Outcome.ABSENT:
                self.verdict.violate("lost", f"{name.key!r} was acknowledged and client {writer} missed it; {self._story(life, began_ns)}")

    def _is_required(self, life: _Life, name: BlockName, writer: int, began_ns: int, ended_ns: int) -> bool:
        """A read of that time has to find the block."""
        if self._told.disturbed.meet(began_ns, ended_ns):
            return False
        newest = max((v for v in life.versions.values() if v.ended_ns is not None and v.ended_ns < began_ns), key=_began, default=None)
        if newest is None or any(newest.began_ns < touched < ended_ns for touched in life.touched):
            return False
        if ACKS[newest.ack] == "node" and writer != name.writer:
            return False
        assert newest.ended_ns is not None
        masks = [mask for when, mask in life.located if newest.ended_ns < when < began_ns]
        return any(self._has_kept(node, newest.began_ns, ended_ns) for node in range(64) if masks and masks[-1] >> node & 1)

    def _has_kept(self, node: int, begin: int, end: int) -> bool:
        return not any(begin <= moment <= end for moment in self._told.lost.get(node, ()))

    def _story(self, life: _Life, moment: int) -> str:
        """Describe the block's life, in seconds before that moment."""

        def ago(when: int | None) -> str:
            return "never" if when is None else f"-{(moment - when) / 1e9:.2f}"

        puts = [f"v{number} {ago(v.began_ns)}..{ago(v.ended_ns)} ack {ACKS[v.ack]}" for number, v in life.versions.items()]
        return f"puts {puts}, located {[(ago(when), bin(mask)) for when, mask in life.located]}"


def _began(version: _Version) -> int:
    return version.began_ns
