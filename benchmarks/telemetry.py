"""`make bench-telemetry`: what metrics and traces cost puts and gets of 4 KiB on one host.

Clusters side by side: one that measures and one whose daemons have no HTTP port and do not; one that traces and one that does not. Turns of
each, by turns first. In the client, whose get from shared memory takes a few microseconds, what is paid on each call is timed by itself
too. A scrape a second goes on meanwhile. Rows go to benchmarks/out/telemetry.json.
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

from benchmarks.parts import run
from kvstore.client import Client
from kvstore.client.cli.replay import show_trouble
from kvstore.client.timings import Timings
from kvstore.client.tools.bench_report import Row
from kvstore.client.tools.cluster import Cluster, ClusterPlan
from kvstore.client.tracing import CALLS, trace_calls
from kvstore.rpc.tracing import CALL
from kvstore.telemetry.tracing.config import TracingSettings

OUT: Final = Path(__file__).parent / "out" / "telemetry.json"
TURNS: Final = 40
OPERATIONS: Final = 500
"""Of each kind in a turn."""
LOOPS: Final = 200_000
VALUE: Final = bytes(4096)
NOWHERE: Final = "http://127.0.0.1:9/v1/traces"
WITHOUT: Final = '[master]\nhttp = ""\nconsole_interval_s = 0\n[node]\nhttp = ""\n'


def main() -> int:
    return run({"calls": call_rows, "countdown": countdown_rows, "traces": tracing_rows}, OUT)


def call_rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        config = Path(folder, "without.toml")
        config.write_text(WITHOUT)
        ways = {"with metrics": "", "without metrics": str(config)}
        clients = {way: opened.enter_context(Client(_cluster(opened, config=text))) for way, text in ways.items()}
        taken_s = _in_turns(clients)
    yield from _compared(taken_s, "without metrics")


def tracing_rows() -> Iterator[Row]:
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


def countdown_rows() -> Iterator[Row]:
    """What each quick call of a client pays for being timed now and then, and what traces cost who is not traced."""
    timings = Timings()
    timings.untimed = 1 << 60
    loop = "t = self\nt.untimed -= 1\nif t.untimed < 0: pass"
    yield Row("countdown of a quick call", _loop_ns(loop, {"self": timings}), "ns")
    yield Row("each request: is its call traced?", _loop_ns("CALL.get()", {"CALL": CALL}), "ns")
    client = Quick()
    bare_ns = _loop_ns("call()", {"call": client.get})
    tracing = trace_calls(client, TracingSettings(endpoint=NOWHERE, sample_ratio=0), name="bench")
    assert tracing is not None
    yield Row("each call with traces wanted, none sampled", _loop_ns("call()", {"call": client.get}) - bare_ns, "ns")
    tracing.close()


class Quick:
    """Has a client's methods, which do nothing."""

    def get(self) -> None:
        return


for name in CALLS:
    setattr(Quick, name, Quick.get)


def _loop_ns(statement: str, names: dict[str, object]) -> float:
    return 1e9 * min(timeit.repeat(statement, globals=names, number=LOOPS, repeat=7)) / LOOPS


def _in_turns(clients: dict[str, Client]) -> dict[tuple[str, str], list[float]]:
    """Seconds an operation in each turn, by operation and way; each way is first, second, ... as often as any other."""
    taken_s: dict[tuple[str, str], list[float]] = {}
    for turn in range(TURNS):
        at = turn % len(clients)
        ways = list(clients)[at:] + list(clients)[:at]
        for way in ways:
            for name, seconds in _turn(clients[way], f"{way} {turn}"):
                taken_s.setdefault((name, way), []).append(seconds)
    return taken_s


def _compared(taken_s: dict[tuple[str, str], list[float]], base: str) -> Iterator[Row]:
    """Medians, and what each way costs beside `base` by the median of the turns."""
    for (name, way), seconds in taken_s.items():
        yield Row(f"{name}, {way}", 1e6 * statistics.median(seconds), "us")
        if way != base:
            pairs = zip(seconds, taken_s[name, base], strict=True)
            yield Row(f"{name}: {way} beside {base}", 100 * (statistics.median(one / other for one, other in pairs) - 1), "%")


def _cluster(opened: contextlib.ExitStack, *, config: str) -> str:
    """The address of a cluster that has a scrape a second, where it has metrics."""
    cluster = opened.enter_context(Cluster(ClusterPlan(is_private=True, dram="64MiB", config=config), on_log=show_trouble))
    cluster.wait_ready()
    if http := cluster.nodes[0].facts("ready", deadline_s=10)["http"]:
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
    while not ending.wait(1.0):
        with urllib.request.urlopen(url, timeout=10) as answer:
            answer.read()


def _turn(client: Client, turn: str) -> Iterator[tuple[str, float]]:
    """Seconds an operation, by its name."""
    keys = [f"{turn} {number}".encode() for number in range(OPERATIONS)]
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
