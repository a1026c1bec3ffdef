"""Many seeds, one after another or over several processes, and their results. A seed is one history in every process."""

import functools
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tests.simulation.run import Outcome, run_schedule
from tests.simulation.schedule import make_schedule

SEEDS_AT_ONCE: Final = 8
"""Handed to a process: to ask for one takes as long as a part of a run."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Result of a seed, without its trace: small enough to be sent between processes."""

    seed: int
    operations: int
    acknowledged: int
    faults: Counter[str]
    """By kind."""
    struck: int
    virtual_s: float
    found: str
    """The kind of its first finding, "" for none."""

    @classmethod
    def of(cls, seed: int, outcome: Outcome) -> "Tally":
        found = outcome.findings[0].kind if outcome.findings else ""
        done = outcome.operations, outcome.acknowledged, outcome.faults, outcome.struck, outcome.virtual_s
        return cls(seed, *done, found)


@dataclass
class Totals:
    """Of many runs."""

    begun_s: float = field(default_factory=time.monotonic)
    runs: int = 0
    operations: int = 0
    acknowledged: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    struck: int = 0
    virtual_s: float = 0.0
    found: dict[str, list[int]] = field(default_factory=dict)
    """Seeds by what they found."""

    def add(self, tally: Tally) -> None:
        self.runs += 1
        self.operations += tally.operations
        self.acknowledged += tally.acknowledged
        self.faults += tally.faults
        self.struck += tally.struck
        self.virtual_s += tally.virtual_s
        if tally.found:
            self.found.setdefault(tally.found, []).append(tally.seed)

    def __str__(self) -> str:
        """One line, and the faults by kind in another."""
        faults, took_s = self.faults.total(), time.monotonic() - self.begun_s
        share = self.struck / faults if faults else 0.0
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        return (
            f"{self.runs} runs, {self.operations} operations ({self.acknowledged} puts acknowledged) in {took_s:.0f} s, "
            f"{self.operations / max(took_s, 1e-9):.0f}/s, {faults} faults, {share:.0%} with an operation under way, "
            f"{self.virtual_s:.0f} s of simulated time, {sum(map(len, self.found.values()))} findings\n  faults: {kinds or 'none'}"
        )


def tally(seed: int, *, operations: int, partitions: int = 0, density: int = 1) -> Tally:
    return Tally.of(seed, run_schedule(make_schedule(seed, operations=operations, partitions=partitions, density=density)))


def sweep(seeds: range, *, operations: int, processes: int, partitions: int = 0, density: int = 1) -> Iterator[Tally]:
    """Run each seed once; yield results in the order of seeds."""
    one = functools.partial(tally, operations=operations, partitions=partitions, density=density)
    if processes == 1:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # forked ones would have gRPC's locks without its threads
        yield from pool.imap(one, seeds, chunksize=SEEDS_AT_ONCE)
