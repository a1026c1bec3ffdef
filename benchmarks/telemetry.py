"""`make bench-telemetry`: what metrics cost puts and gets of 4 KiB on one host.

Two clusters side by side, one that measures and one whose daemons have no HTTP port and do not; turns of each, by turns first. In the
client, whose get from shared memory takes a few microseconds, what is paid on each call is timed by itself too. A scrape a second goes on
meanwhile. Rows go to benchmarks/out/telemetry.json.
"""

import contextlib
import statistics
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

OUT: Final = Path(__file__).parent / "out" / "telemetry.json"
TURNS: Final = 40
OPERATIONS: Final = 500
"""Of each kind in a turn."""
LOOPS: Final = 200_000
VALUE: Final = bytes(4096)
WITHOUT: Final = '[master]\nhttp = ""\nconsole_interval_s = 0\n[node]\nhttp = ""\n'


def main() -> int:
    return run({"calls": call_rows, "countdown": countdown_rows}, OUT)


def call_rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        config = Path(folder, "without.toml")
        config.write_text(WITHOUT)
        clients = {way: opened.enter_context(_client(opened, config=text)) for way, text in (("with", ""), ("without", str(config)))}
        taken_s: dict[tuple[str, str], list[float]] = {}
        for turn in range(TURNS):
            ways = list(clients) if turn % 2 else list(reversed(clients))
            for way in ways:
                for name, seconds in _turn(clients[way], turn):
                    taken_s.setdefault((name, way), []).append(seconds)
    for name in ("put of 4 KiB", "get of 4 KiB", "locate"):
        medians = {way: statistics.median(taken_s[name, way]) for way in clients}
        for way, seconds in medians.items():
            yield Row(f"{name}, {way} metrics", 1e6 * seconds, "us")
        pairs = zip(taken_s[name, "with"], taken_s[name, "without"], strict=True)
        yield Row(f"{name}: metrics cost", 100 * (statistics.median(one / other for one, other in pairs) - 1), "%")


def countdown_rows() -> Iterator[Row]:
    """What each quick call of a client pays for being timed now and then."""
    timings = Timings()
    timings.untimed = 1 << 60
    loop = "t = self\nt.untimed -= 1\nif t.untimed < 0: pass"
    yield Row(
        "countdown of a quick call", 1e9 * min(timeit.repeat(loop, globals={"self": timings}, number=200_000, repeat=7)) / 200_000, "ns"
    )


def _client(opened: contextlib.ExitStack, *, config: str) -> Client:
    cluster = opened.enter_context(Cluster(ClusterPlan(is_private=True, dram="64MiB", config=config), on_log=show_trouble))
    cluster.wait_ready()
    if http := cluster.nodes[0].facts("ready", deadline_s=10)["http"]:
        ending = threading.Event()
        scraping = threading.Thread(target=_scrape, args=(f"http://{http}/metrics", ending))
        scraping.start()
        opened.callback(scraping.join)
        opened.callback(ending.set)
    return Client(cluster.address)


def _scrape(url: str, ending: threading.Event) -> None:
    while not ending.wait(1.0):
        with urllib.request.urlopen(url, timeout=10) as answer:
            answer.read()


def _turn(client: Client, turn: int) -> Iterator[tuple[str, float]]:
    """Seconds an operation, by its name."""
    keys = [b"%d %d" % (turn, number) for number in range(OPERATIONS)]
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
