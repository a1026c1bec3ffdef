"""Report of a chaos run: counts, stalls by kind of fault, and whether the run passed."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.faults.journal import Outcome
from tests.faults.judging import Verdict
from tests.faults.moves import Moved, summed

MIN_STRUCK_SHARE: Final = 0.05
"""Of the faults, with an operation in flight that felt it: else the run shows nothing."""
MIN_JUDGED: Final = 20
"""Faults from which on the share is judged: of three, none may be felt by chance."""
FELT_TIMES: Final = 5
"""An operation felt a fault that it was in flight with if it failed, or took so many times as long as half of them."""
MORE_DESCRIPTORS: Final = 32
"""Allowed growth of descriptors over the run, since peers reconnect."""
MORE_MEMORY: Final = 64 << 20
Used = Mapping[str, Mapping[str, int]]
"""By daemon: bytes of memory and descriptors."""


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that was made. Times in nanoseconds; `struck_ns` 0: it had no effect."""

    kind: str
    text: str
    began_ns: int
    struck_ns: int
    healed_ns: int
    settled_ns: int


@dataclass(frozen=True, slots=True)
class OfKind:
    """Faults of one kind: how many were made, struck, had an operation in flight, and were felt by one."""

    made: int
    struck: int
    in_flight: int
    felt: int
    longest_stall_s: float
    """The longest time in which one client had no answer, of those with answers before and after."""


@dataclass(frozen=True, slots=True)
class Report:
    seed: int
    seconds: float
    verdict: Verdict
    kinds: dict[str, OfKind]
    before: Used
    after: Used
    trouble: list[str]
    unprovoked: int = 0
    """Number of times the site was not at rest with no fault under way."""
    moves: dict[str, dict[str, int]] = field(default_factory=dict)
    """Counts of faults that struck while blocks moved (moves.py), by kind."""

    @classmethod
    def made(
        cls,
        seed: int,
        seconds: float,
        verdict: Verdict,
        faults: Sequence[Done],
        journals: Sequence[tuple[int, Any]],
        before: Used,
        after: Used,
        trouble: list[str],
        *,
        writers: int,
        unprovoked: int = 0,
        moves: Sequence[Moved] = (),
    ) -> "Report":
        """`journals` by writer, those below `writers` of clients under load."""
        by_kind: dict[str, list[Done]] = defaultdict(list)
        for fault in faults:
            by_kind[fault.kind].append(fault)
        seen = Flights([(writer, records) for writer, records in journals if writer < writers])
        kinds = {kind: seen.of_kind(by_kind[kind]) for kind in sorted(by_kind)}
        return cls(seed, seconds, verdict, kinds, before, after, trouble, unprovoked, summed(moves))

    @property
    def felt_share(self) -> float:
        made = sum(kind.made for kind in self.kinds.values())
        return sum(kind.felt for kind in self.kinds.values()) / made if made else 0.0

    @property
    def is_good(self) -> bool:
        made = sum(kind.made for kind in self.kinds.values())
        shows_enough = self.felt_share >= MIN_STRUCK_SHARE or 0 < made < MIN_JUDGED
        return not self.verdict.violations and not self.trouble and shows_enough

    def as_json(self) -> dict[str, Any]:
        """asdict makes a Counter of a Counter's pairs."""
        verdict = {**asdict(self.verdict), "violations": dict(self.verdict.violations)}
        return {**asdict(self), "verdict": verdict, "felt_share": self.felt_share, "is_good": self.is_good}


class Flights:
    """The operations of all clients by time."""

    def __init__(self, journals: Sequence[tuple[int, Any]]) -> None:
        by_writer: dict[int, list[Any]] = defaultdict(list)
        for writer, records in journals:
            by_writer[writer].append(records[records["ended_ns"] > 0])
        self._ended = {writer: np.sort(np.concatenate(parts), order="ended_ns") for writer, parts in by_writer.items()}
        took = [row for records in self._ended.values() for row in (records["ended_ns"] - records["began_ns"]).tolist()]
        self._usual_ns = median(took) if took else 0

    def of_kind(self, faults: Sequence[Done]) -> OfKind:
        struck = [fault for fault in faults if fault.struck_ns]
        flying = [self._flying(fault.struck_ns) for fault in struck]
        return OfKind(
            made=len(faults),
            struck=len(struck),
            in_flight=sum(any(len(records) for records in found) for found in flying),
            felt=sum(any(self._felt(records) for records in found) for found in flying),
            longest_stall_s=max((self._stall_ns(fault) for fault in struck), default=0) / 1e9,
        )

    def _flying(self, moment: int) -> list[Any]:
        return [records[(records["began_ns"] < moment) & (records["ended_ns"] > moment)] for records in self._ended.values()]

    def _felt(self, records: Any) -> bool:
        took_ns = records["ended_ns"] - records["began_ns"]
        return bool(((records["outcome"] == Outcome.FAILED) | (took_ns > FELT_TIMES * self._usual_ns)).any())

    def _stall_ns(self, fault: Done) -> int:
        """From the answer before it struck to the first one after it was over, of each client."""
        longest = 0
        for records in self._ended.values():
            good = records["ended_ns"][np.isin(records["outcome"], (Outcome.DONE, Outcome.ABSENT))]
            begin, end = np.searchsorted(good, (fault.struck_ns, fault.settled_ns))
            within = good[max(0, begin - 1) : end + 1]
            if len(within) > 1:
                longest = max(longest, int(np.diff(within).max()))
        return longest


def daemons_changed(before: Used, after: Used) -> list[str]:
    """Return the daemons whose memory or descriptors grew beyond the limits."""
    found = []
    for name, used in after.items():
        for what, more in (("descriptors", MORE_DESCRIPTORS), ("memory_bytes", MORE_MEMORY)):
            first = before[name][what]
            if used[what] > first + more:
                found.append(f"{name}: {what} {first:,} at the beginning, {used[what]:,} at the end")
    return found


def printed(report: Report) -> None:
    console, verdict = Console(), report.verdict
    table = Table(
        "fault", "made", "struck", "in flight", "felt", "longest stall", title=f"chaos, seed {report.seed}, {report.seconds:.0f} s"
    )
    for kind, of in report.kinds.items():
        table.add_row(kind, str(of.made), str(of.struck), str(of.in_flight), str(of.felt), f"{of.longest_stall_s:.1f} s")
    console.print(table)
    daemons = Table("daemon", "memory at the beginning", "at the end", "descriptors at the beginning", "at the end")
    for name, first in report.before.items():
        last = report.after[name]
        memory = [f"{used['memory_bytes'] / (1 << 20):.0f} MiB" for used in (first, last)]
        daemons.add_row(name, *memory, str(first["descriptors"]), str(last["descriptors"]))
    console.print(daemons)
    for kind, row in report.moves.items():
        console.print(f"while blocks moved, {kind}: {', '.join(f'{name} {count:,}' for name, count in row.items())}")
    console.print(
        f"{verdict.acknowledged:,} operations acknowledged, {verdict.failed:,} failed with errors to be retried; {verdict.hits:,} hits, "
        f"{verdict.misses:,} misses, {verdict.required:,} reads that had to find their block; longest call "
        f"{verdict.longest_ns / 1e9:.1f} s; "
        f"{report.felt_share:.0%} of the faults felt by an operation in flight; {report.unprovoked} times not at rest without a fault"
    )
    for text in (*(f"{kind}: {count}" for kind, count in verdict.violations.items()), *verdict.examples, *report.trouble):
        console.print(f"[red]{text}", highlight=False)
    console.print("[green]nothing that may not happen" if report.is_good else "[red]not good")
