"""Seeds of the simulation, run one after another; a finding is cut down and printed as a schedule that runs again.

python -m tests.simulation --seeds 0:10000          # each seed once; --operations N makes each run longer
python -m tests.simulation --seed 4711 --trace      # one of them, with every message
python -m tests.simulation --schedule FILE --trace  # a schedule that was printed
"""

import argparse
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.run import Outcome, run_schedule
from tests.simulation.schedule import Schedule, make_schedule
from tests.simulation.shrinking import shrink


@dataclass
class Totals:
    """Of many runs."""

    runs: int = 0
    operations: int = 0
    acknowledged: int = 0
    faults: int = 0
    struck: int = 0
    virtual_s: float = 0.0
    found: dict[str, list[int]] = field(default_factory=dict)
    """Seeds by what they found."""

    def add(self, seed: int, outcome: Outcome) -> None:
        self.runs += 1
        self.operations += outcome.operations
        self.acknowledged += outcome.acknowledged
        self.faults += outcome.faults
        self.struck += outcome.struck
        self.virtual_s += outcome.virtual_s
        if outcome.findings:
            self.found.setdefault(outcome.findings[0].kind, []).append(seed)

    def __str__(self) -> str:
        share = self.struck / self.faults if self.faults else 0.0
        return (
            f"{self.runs} runs, {self.operations} operations ({self.acknowledged} puts acknowledged), {self.faults} faults, "
            f"{share:.0%} with an operation under way, {self.virtual_s:.0f} s of simulated time, "
            f"{sum(map(len, self.found.values()))} findings"
        )


def first_kind(schedule: Schedule) -> str:
    findings = run_schedule(schedule).findings
    return findings[0].kind if findings else ""


def report(schedule: Schedule, outcome: Outcome, *, shrinks: bool) -> None:
    """Print what was found, and the least schedule that finds it."""
    for finding in outcome.findings:
        print(f"seed {schedule.seed}: {finding}")
        if finding.__cause__ is not None:
            traceback.print_exception(finding.__cause__, file=sys.stdout)
    if shrinks:
        small = shrink(schedule, first_kind)
        print(f"the least of it, {len(small.steps)} of {len(schedule.steps)} steps; to run it again: --schedule FILE --trace")
        print(small.to_json(), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seeds", metavar="FROM:TO", help="half-open")
    what.add_argument("--seed", type=int)
    what.add_argument("--schedule", type=Path, metavar="FILE")
    parser.add_argument("--operations", type=int, default=24, help="of each run, about")
    parser.add_argument("--trace", action="store_true", help="print every operation, fault and message")
    parser.add_argument("--no-shrink", action="store_true", help="do not cut down what finds something")
    chosen = parser.parse_args(arguments)
    if chosen.schedule is not None:
        schedules = [Schedule.from_json(chosen.schedule.read_text())]
    elif chosen.seed is not None:
        schedules = [make_schedule(chosen.seed, operations=chosen.operations)]
    else:
        first, _, end = chosen.seeds.partition(":")
        schedules = (make_schedule(seed, operations=chosen.operations) for seed in range(int(first), int(end)))  # type: ignore[assignment]
    totals, told_s = Totals(), time.monotonic()
    for schedule in schedules:
        outcome = run_schedule(schedule, keeps_trace=chosen.trace)
        totals.add(schedule.seed, outcome)
        if chosen.trace:
            print(*outcome.lines, f"trace {outcome.trace_hash}", sep="\n")
        if outcome.findings:
            report(schedule, outcome, shrinks=not chosen.no_shrink)
        if time.monotonic() - told_s > 60:
            print(f"up to seed {schedule.seed}: {totals}", flush=True)
            told_s = time.monotonic()
    print(totals)
    for kind, seeds in totals.found.items():
        print(f"  {kind}: {len(seeds)} seeds, {seeds[:10]}")
    return 1 if totals.found else 0


if __name__ == "__main__":
    sys.exit(main())
