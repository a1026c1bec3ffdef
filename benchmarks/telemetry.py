"""`make bench-telemetry`: cost of metrics and traces to puts and gets of 4 KiB on one host.

- Metrics, in loops: the code that a call runs for metrics, in client and daemon, is timed alone and compared with the call in the same run.
  Two identical clusters differ by more than this cost.
- Metrics, in pairs of fresh clusters: one measures and is scraped as by Prometheus. The other has no HTTP port and does not measure.
  They take turns of some hundred calls. The row is the mean of the pairs' ratios, with its standard error.
- Traces: clusters side by side, in whole turns.

Rows go to benchmarks/out/telemetry.json.
"""

import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import timeit
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from benchmarks.harness import run
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow, at_most
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client
from kvstore.client.stats import Timings, timed
from kvstore.client.tracing import CALLS, trace_calls
from kvstore.protocol.node_messages import Put
from kvstore.rpc.tracing import CALL, Stopwatch
from kvstore.telemetry.metrics.requests import RequestMetrics
from kvstore.telemetry.tracing.config import TracingSettings

OUT: Final = Path(__file__).parent / "out" / "telemetry.json"
TURNS: Final = 40
OPERATIONS: Final = 500
"""Of each kind in a turn."""
PAIRS: Final = 16
"""Of clusters with and without metrics."""
PAIR_TURNS: Final = 6
PAIR_OPERATIONS: Final = 400
SCRAPE_S: Final = 5.0
"""Three times as often as is usual: else a pair of clusters would not live to see one."""
LOOPS: Final = 200_000
MOST_COST_PERCENT: Final = 2.0
VALUE: Final = bytes(4096)
NOWHERE: Final = "http://127.0.0.1:9/v1/traces"
WITHOUT: Final = '[master]\nhttp = ""\n[node]\nhttp = ""\n'


def main() -> int:
    return run({"calls": call_rows, "countdown": countdown_rows, "traces": tracing_rows}, OUT)


def call_rows() -> Iterator[BenchRow]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "without.toml")
        config.write_text(WITHOUT)
        ways = {"with metrics": "", "without metrics": str(config)}
        pairs, request_ns, call_ns, countdown_ns = [], [], [], []
        for number in range(PAIRS):
            pairs.append(_pair(ways if number % 2 else dict(reversed(ways.items()))))
            request_ns.append(_request_ns())
            call_ns.append(_call_ns())
            countdown_ns.append(_countdown_ns())
    paid_ns = {"put of 4 KiB": (request_ns, call_ns), "get of 4 KiB": (countdown_ns,), "locate": (request_ns, call_ns)}
    yield BenchRow("a request that a daemon times", statistics.median(request_ns), "ns")
    yield BenchRow("a call that a client times", statistics.median(call_ns), "ns")
    yield BenchRow("a quick call that a client counts down", statistics.median(countdown_ns), "ns")
    for name, parts in paid_ns.items():
        bare_us = 1e6 * statistics.median(seconds for pair in pairs for seconds in pair[name, "without metrics"])
        yield BenchRow(f"{name}, daemons without metrics", bare_us, "us")
        paid_us = sum(map(statistics.median, parts)) / 1e3
        yield at_most(f"{name}: what its client and daemon run for metrics", 100 * paid_us / bare_us, "%", MOST_COST_PERCENT)
        ratios = [statistics.median(pair[name, "with metrics"]) / statistics.median(pair[name, "without metrics"]) for pair in pairs]
        yield BenchRow(f"{name}: with metrics beside without, mean of {PAIRS} pairs", 100 * (statistics.mean(ratios) - 1), "%")
        yield BenchRow(f"{name}: its standard error", 100 * statistics.stdev(ratios) / PAIRS**0.5, "%")


def _pair(ways: dict[str, str]) -> dict[tuple[str, str], list[float]]:
    """Seconds an operation, by operation and way, in each turn of two fresh clusters. The first turn warms them up."""
    with contextlib.ExitStack() as opened:
        clients = {way: opened.enter_context(Client(_cluster(opened, config=text))) for way, text in ways.items()}
        taken_s = _in_turns(clients, turns=PAIR_TURNS + 1, operations=PAIR_OPERATIONS)
    return {place: seconds[1:] for place, seconds in taken_s.items()}


def _request_ns() -> float:
    """Return the cost of a request to the loop that serves it, including folding of the log."""
    requests = RequestMetrics()
    stopwatch = Stopwatch(requests)
    names = {"stopwatch": stopwatch, "kind": Put.TYPE}
    return _loop_ns("stopwatch.begin(7, kind)\nstopwatch.answered(7)", names, after=requests.rotate)


def _call_ns() -> float:
    """Return the additional cost of a timed method."""
    timed_ns = _loop_ns("client.timed(b'key', b'value')", {"client": Quick()})
    return timed_ns - _loop_ns("client.untimed(b'key', b'value')", {"client": Quick()})


def _countdown_ns() -> float:
    timings = Timings()
    timings.untimed = 1 << 60
    return _loop_ns("t = self\nt.untimed -= 1\nif t.untimed < 0: pass", {"self": timings})


def tracing_rows() -> Iterator[BenchRow]:
    """Traces: off, wanted with no call sampled, and one call in a hundred sampled; the collector is a process that throws all away."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        endpoint = _collector(opened)
        config = Path(folder, "traced.toml")
        config.write_text(f'[tracing]\nendpoint = "{endpoint}"\n')
        clients = {"traces off": opened.enter_context(Client(_cluster(opened, config=""), tracing=TracingSettings()))}
        for way, ratio in (("no call sampled", 0.0), ("1 % sampled", 0.01)):
            settings = TracingSettings(endpoint=endpoint, sample_ratio=ratio)
            clients[way] = opened.enter_context(Client(_cluster(opened, config=str(config)), tracing=settings))
        taken_s = _in_turns(clients)
    yield from _compared(taken_s, "traces off")


def countdown_rows() -> Iterator[BenchRow]:
    """Cost of sampled timing to each fast call of a client, and cost of traces to a call that is not traced."""
    yield BenchRow("countdown of a quick call", _countdown_ns(), "ns")
    yield BenchRow("each request: is its call traced?", _loop_ns("CALL.get()", {"CALL": CALL}), "ns")
    client = Quick()
    bare_ns = _loop_ns("call()", {"call": client.get})
    tracing = trace_calls(client, TracingSettings(endpoint=NOWHERE, sample_ratio=0), name="bench")
    assert tracing is not None
    yield BenchRow("each call with traces wanted, none sampled", _loop_ns("call()", {"call": client.get}) - bare_ns, "ns")
    tracing.close()


class Quick:
    """Has a client's methods, which do nothing."""

    def __init__(self) -> None:
        self._timings = Timings()

    def get(self) -> None:
        return

    def untimed(self, key: bytes, value: bytes) -> None:
        return

    timed = timed(untimed)


for name in CALLS:
    setattr(Quick, name, Quick.get)


def _loop_ns(statement: str, names: dict[str, object], *, after: Callable[[], None] = lambda: None) -> float:
    """Of one time, with its part of `after`, which is called for every thousand; by the processor's time of this thread."""
    timer = timeit.Timer(statement, globals=names, timer=time.thread_time)
    loops_s = []
    for _ in range(LOOPS // 1000):
        loop_s, began_s = timer.timeit(1000), time.thread_time()
        after()
        loops_s.append(loop_s + time.thread_time() - began_s)
    return 1e6 * statistics.median(loops_s)


def _in_turns(clients: dict[str, Client], *, turns: int = TURNS, operations: int = OPERATIONS) -> dict[tuple[str, str], list[float]]:
    """Seconds an operation in each turn, by operation and way; each way is first, second, ... as often as any other."""
    taken_s: dict[tuple[str, str], list[float]] = {}
    for turn in range(turns):
        at = turn % len(clients)
        ways = list(clients)[at:] + list(clients)[:at]
        for way in ways:
            for name, seconds in _turn(clients[way], f"{way} {turn}", operations):
                taken_s.setdefault((name, way), []).append(seconds)
    return taken_s


def _compared(taken_s: dict[tuple[str, str], list[float]], base: str) -> Iterator[BenchRow]:
    """Medians, and what each way costs beside `base` by the median of the turns."""
    for (name, way), seconds in taken_s.items():
        yield BenchRow(f"{name}, {way}", 1e6 * statistics.median(seconds), "us")
        if way != base:
            pairs = zip(seconds, taken_s[name, base], strict=True)
            yield BenchRow(f"{name}: {way} beside {base}", 100 * (statistics.median(one / other for one, other in pairs) - 1), "%")


def _cluster(opened: contextlib.ExitStack, *, config: str) -> str:
    """The address of a cluster that is scraped, where it has metrics."""
    cluster = opened.enter_context(LocalCluster(ClusterPlan(is_private=True, dram="64MiB", config=config), on_log=show_warning))
    cluster.wait_warm()
    if http := cluster.nodes[0].facts("ready", deadline_s=10)["http"]:
        _scrape_once(f"http://{http}/metrics")  # a daemon loads its HTTP server when it is asked first: a third of a second, once
        ending = threading.Event()
        scraping = threading.Thread(target=_scrape, args=(f"http://{http}/metrics", ending))
        scraping.start()
        opened.callback(scraping.join)
        opened.callback(ending.set)
    return cluster.address


def _collector(opened: contextlib.ExitStack) -> str:
    """The endpoint of a collector of traces, a process that ends with `opened`."""
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.collector_child"], stdout=subprocess.PIPE, text=True)
    opened.callback(child.wait)
    opened.callback(child.terminate)
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _scrape(url: str, ending: threading.Event) -> None:
    while not ending.wait(SCRAPE_S):
        _scrape_once(url)


def _scrape_once(url: str) -> None:
    with urllib.request.urlopen(url, timeout=30) as answer:
        answer.read()


def _turn(client: Client, turn: str, operations: int) -> Iterator[tuple[str, float]]:
    """Seconds an operation, by its name."""
    keys = [f"{turn} {number}".encode() for number in range(operations)]
    yield "put of 4 KiB", _each(lambda key: client.put(key, VALUE), keys)
    yield "get of 4 KiB", _each(client.get, keys)
    client.flush()
    yield "locate", _each(lambda key: client.locate([key]), keys)


def _each(call: Callable[[bytes], object], keys: list[bytes]) -> float:
    began_s = time.perf_counter()
    for key in keys:
        call(key)
    return (time.perf_counter() - began_s) / len(keys)


if __name__ == "__main__":
    sys.exit(main())
