"""Runs seeds of the simulation; a finding is shrunk and printed as a schedule that can be run again.

python -m tests.simulation --seeds 0:10000          # each seed once.
python -m tests.simulation --seed 4711 --trace      # one seed, with every message.
python -m tests.simulation --schedule FILE --trace  # a schedule that was printed.

`--operations N` makes each run longer, `--processes N` spreads the seeds.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path
from typing import Final

from tests.simulation.run import Outcome, run_schedule
from tests.simulation.schedule import Schedule, make_schedule
from tests.simulation.shrinking import shrink
from tests.simulation.sweep import Tally, Totals, sweep

TELL_S: Final = 60.0


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


def run_one(schedule: Schedule, *, is_traced: bool, shrinks: bool) -> Totals:
    totals = Totals()
    outcome = run_schedule(schedule, keeps_trace=is_traced)
    totals.add(Tally.of(schedule.seed, outcome))
    if is_traced:
        print(*outcome.lines, f"trace {outcome.trace_hash}", sep="\n")
    if outcome.findings:
        report(schedule, outcome, shrinks=shrinks)
    return totals


def run_many(seeds: range, *, operations: int, processes: int, shrinks: bool, partitions: int = 0, density: int = 1) -> Totals:
    """Run seeds; a seed with a finding is run again in this process."""
    totals, told_s = Totals(), time.monotonic()
    for tally in sweep(seeds, operations=operations, processes=processes, partitions=partitions, density=density):
        totals.add(tally)
        if tally.found:
            schedule = make_schedule(tally.seed, operations=operations, partitions=partitions, density=density)
            report(schedule, run_schedule(schedule), shrinks=shrinks)
        if time.monotonic() - told_s > TELL_S:
            print(f"up to seed {tally.seed}: {totals}", flush=True)
            told_s = time.monotonic()
    return totals


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seeds", metavar="FROM:TO", help="half-open")
    what.add_argument("--seed", type=int)
    what.add_argument("--schedule", type=Path, metavar="FILE")
    parser.add_argument("--operations", type=int, default=24, help="of each run, about")
    parser.add_argument("--partitions", type=int, default=0, help="of the key space, in every run; default: as the seeds have it")
    parser.add_argument("--density", type=int, default=1, help="so many times as many operations in a second, with no more faults")
    parser.add_argument("--processes", type=int, default=1, help="with --seeds: so many at once")
    parser.add_argument("--trace", action="store_true", help="not with --seeds: print every operation, fault and message")
    parser.add_argument("--no-shrink", action="store_true", help="do not cut down what finds something")
    chosen = parser.parse_args(arguments)
    if chosen.processes < 1 or chosen.density < 1 or (chosen.trace and chosen.seeds is not None):
        parser.error("--processes and --density are 1 or more, and --trace is for a single run")
    drawn = {"operations": chosen.operations, "partitions": chosen.partitions, "density": chosen.density}
    if chosen.seeds is not None:
        first, _, end = chosen.seeds.partition(":")
        seeds = range(int(first), int(end))
        totals = run_many(seeds, **drawn, processes=chosen.processes, shrinks=not chosen.no_shrink)
    else:
        is_given = chosen.schedule is not None
        schedule = Schedule.from_json(chosen.schedule.read_text()) if is_given else make_schedule(chosen.seed, **drawn)
        totals = run_one(schedule, is_traced=chosen.trace, shrinks=not chosen.no_shrink)
    print(totals)
    for kind, found in totals.found.items():
        print(f"  {kind}: {len(found)} seeds, {found[:10]}")
    return 1 if totals.found else 0


if __name__ == "__main__":
    sys.exit(main())
