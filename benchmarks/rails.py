"""`make bench-rails`: two engines on two hosts with three rails; rails are cut and restored under load. See
tests/transfer/paths/rails_child.py.

Reads without pause, every byte compared. Throughput is that of windows of 100 ms. Rows go to benchmarks/out/rails.json.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from benchmarks.harness import report
from kvstore.cli.tools.bench import BenchRow, at_least, at_most
from tests.namespaces import Cut, TwoHosts, why_not
from tests.transfer.paths.rails_child import Load, Look

OUT: Final = Path(__file__).parent / "out" / "rails.json"
RATES_GBIT_S: Final = (1, 2, 4)
NEEDED_SHARE: Final = 0.85
RECOVERED_WITHIN_S: Final = 2.0
USED_AGAIN_WITHIN_S: Final = 10.0
WINDOW_S: Final = 0.1
WARM_UP_S: Final = 2.0
STEADY_S: Final = 4.0
CUT_S: Final = 5.0
LONG_CUT_S: Final = 18.0
"""Long enough for the rests between probes to have grown to their longest."""
PATIENCE_S: Final = 20.0


def main() -> int:
    reason = why_not()
    if reason:
        print(f"make bench-rails: {reason}", file=sys.stderr)
        return 1
    with TwoHosts(RATES_GBIT_S) as hosts, Load(hosts) as load:
        return report(measure(hosts, load), OUT)


def measure(hosts: TwoHosts, load: Load) -> Iterator[BenchRow]:
    watch(load, WARM_UP_S)
    yield from steady_rows(watch(load, STEADY_S))
    for kind in Cut:
        for rail in reversed(range(len(RATES_GBIT_S))):
            yield from cut_rows(hosts, load, rail, kind, CUT_S)
    yield from cut_rows(hosts, load, len(RATES_GBIT_S) - 1, Cut.SILENT, LONG_CUT_S)
    last = load.close()
    yield BenchRow("batches of 8 x 4 MiB", last.batches, "")
    yield at_most("errors told to callers", len(last.errors), "", 0)
    yield at_most("blocks with wrong bytes", last.wrong_blocks, "", 0)


def steady_rows(looks: Sequence[Look]) -> Iterator[BenchRow]:
    first, last = looks[0], looks[-1]
    taken_ns = last.now_ns - first.now_ns
    gb_s = (last.total_bytes - first.total_bytes) / taken_ns
    yield BenchRow("three rails: read", gb_s, "GB/s")
    yield at_least("three rails: read / sum of their rates", gb_s / gbyte_s(RATES_GBIT_S), "ratio", NEEDED_SHARE)
    for rate, device in zip(RATES_GBIT_S, first.delivered_bytes, strict=True):
        carried = (last.delivered_bytes[device] - first.delivered_bytes[device]) / taken_ns
        yield at_least(f"three rails: {device} / its {rate} Gbit/s", carried / gbyte_s([rate]), "ratio", NEEDED_SHARE)


def cut_rows(hosts: TwoHosts, load: Load, rail: int, kind: Cut, cut_s: float) -> Iterator[BenchRow]:
    """Cut a rail, restore it, and leave all rails at work again."""
    name, device = f"rail {rail} cut, {kind.value}, {cut_s:g} s", hosts.rails[rail].device
    left = gbyte_s([rate for i, rate in enumerate(RATES_GBIT_S) if i != rail])
    hosts.cut(rail, kind)
    looks = watch(load, cut_s)
    yield at_most(f"{name}: recovered after", recovered_s(looks, NEEDED_SHARE * left), "s", RECOVERED_WITHIN_S)
    mean = (looks[-1].total_bytes - looks[0].total_bytes) / (looks[-1].now_ns - looks[0].now_ns)
    yield at_least(f"{name}: read / what is left", mean / left, "ratio", NEEDED_SHARE)
    yield BenchRow(f"{name}: slowest batch", max(look.slowest_batch_s for look in looks), "s")
    before = looks[-1].delivered_bytes[device]
    restored_ns = time.monotonic_ns()
    hosts.restore(rail)
    looks = watch(load, PATIENCE_S, until=lambda look: look.delivered_bytes[device] > before)
    yield at_most(f"{name}: used again after", (looks[-1].now_ns - restored_ns) / 1e9, "s", USED_AGAIN_WITHIN_S)
    watch(load, WARM_UP_S)


def recovered_s(looks: Sequence[Look], needed_gb_s: float) -> float:
    """When the last window ended that was slower than needed, in seconds after the first look; 0 when none was."""
    slow = [two.now_ns for one, two in pairwise(looks) if two.total_bytes - one.total_bytes < needed_gb_s * (two.now_ns - one.now_ns)]
    return (max(slow) - looks[0].now_ns) / 1e9 if slow else 0.0


def watch(load: Load, seconds: float, *, until: Callable[[Look], bool] = lambda look: False) -> list[Look]:
    """A look each WINDOW_S, for so long or until one is as wanted."""
    looks = [load.look()]
    end_ns = looks[0].now_ns + int(seconds * 1e9)
    while looks[-1].now_ns < end_ns and not until(looks[-1]):
        threading.Event().wait(max(0.0, WINDOW_S - (time.monotonic_ns() - looks[-1].now_ns) / 1e9))
        looks.append(load.look())
    return looks


def gbyte_s(rates_gbit_s: Sequence[float]) -> float:
    return sum(rates_gbit_s) / 8


if __name__ == "__main__":
    sys.exit(main())
