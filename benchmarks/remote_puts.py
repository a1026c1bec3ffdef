"""Puts and gets of other hosts' nodes against a frame of a few bytes, the link, Mooncake's store and Redis, all over the same veth pair.

`make bench-remote PARTS="small shaped unshaped"`. Servers are processes on one host, clients on the other (tests/namespaces.py), and take
turns; every value is compared. Both sides of a ratio are the best of all rounds. Rows go to benchmarks/out/remote.json.
"""

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks import harness
from benchmarks.remote import NODE_PORT, ask, cluster, start
from benchmarks.transfer_peers import MOONCAKE_FOLDER, Trouble, found_program, mooncake_python
from kvstore.cli.tools.bench import BenchRow, at_least, at_most
from tests.namespaces import TwoHosts, why_not
from tests.transfer.paths.rails_child import answer_of

OUT: Final = Path(__file__).parent / "out" / "remote.json"
LINK_GBIT_S: Final = 5
BLOCKS: Final = 32
BLOCK_BYTES: Final = 2 << 20
ROUNDS: Final = 5
CALLS: Final = 400
RATE_S: Final = 1.0
WARM_S: Final = 2.5
"""Of puts before the rounds: each memory has been written to once by then."""
REDIS_PORT: Final = 7470
MOONCAKE_PORT: Final = 7480
"""Of its master; its metrics are at the next one."""
LINK_AIM: Final = 0.97
MOONCAKE_AIM: Final = 1.5
FRAME_AIM: Final = 2.0


def small_rows() -> Iterator[BenchRow]:
    """A put of 4 KiB, new keys each, and a frame of a few bytes to the same node."""
    with TwoHosts((0,)) as hosts, ExitStack() as stack:
        address = hosts.rails[0].addresses[1]
        [client] = cluster(hosts, stack)
        peers = {"kvstore": client, "Redis": _redis(hosts), "Mooncake": _mooncake(hosts)}
        for peer in peers.values():
            ask(peer, what="put_latency", calls=CALLS)
        frames: list[float] = []
        taken: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(ROUNDS):
            frames.append(statistics.median(ask(client, what="node_frames", address=f"{address}:{NODE_PORT}", calls=CALLS)))
            for name, peer in peers.items():
                taken[name].append(statistics.median(ask(peer, what="put_latency", calls=CALLS)))
    frame, put = min(frames), min(taken["kvstore"])
    yield BenchRow("remote: frame to the node, p50", frame, "us")
    yield BenchRow("remote: put of 4 KiB, p50", put, "us")
    yield at_most("remote: put of 4 KiB / frame", put / frame, "ratio", FRAME_AIM)
    for name in ("Mooncake", "Redis"):
        yield BenchRow(f"remote: put of 4 KiB, {name}, p50", min(taken[name]), "us")
        yield BenchRow(f"remote: put of 4 KiB, {name} / us", min(taken[name]) / put, "ratio")


def shaped_rows() -> Iterator[BenchRow]:
    """Batches of 32 x 2 MiB over a shaped link, as shares of it."""
    link = LINK_GBIT_S * 1e9 / 8
    for operation, found in _rates(LINK_GBIT_S).items():
        label = f"remote: {operation} {BLOCKS} x 2 MiB / {LINK_GBIT_S} Gbit/s"
        yield at_least(label, found["kvstore"] / link, "ratio", LINK_AIM)
        yield BenchRow(f"{label}, Mooncake", found["Mooncake"] / link, "ratio")


def unshaped_rows() -> Iterator[BenchRow]:
    """The same over a link that carries what the processors can."""
    for operation, found in _rates(0).items():
        label = f"remote: {operation} {BLOCKS} x 2 MiB, unshaped"
        yield BenchRow(label, found["kvstore"] / 1e9, "GB/s")
        yield BenchRow(f"{label}, Mooncake", found["Mooncake"] / 1e9, "GB/s")
        yield at_least(f"{label} / Mooncake", found["kvstore"] / found["Mooncake"], "ratio", MOONCAKE_AIM)


def _rates(gbit_s: float) -> dict[str, dict[str, float]]:
    """Bytes a second, by operation and store."""
    with TwoHosts((gbit_s,)) as hosts, ExitStack() as stack:
        [client] = cluster(hosts, stack)
        peers = {"kvstore": client, "Mooncake": _mooncake(hosts)}
        batch = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES}
        for peer in peers.values():
            ask(peer, what="put_rate", seconds=WARM_S, **batch)
        found: dict[str, dict[str, list[float]]] = {operation: {name: [] for name in peers} for operation in ("put", "get")}
        for _ in range(ROUNDS):
            for operation, by_name in found.items():
                for name, peer in peers.items():
                    by_name[name].append(ask(peer, what=f"{operation}_rate", seconds=RATE_S, **batch))
    return {operation: {name: max(rates) for name, rates in by_name.items()} for operation, by_name in found.items()}


def _redis(hosts: TwoHosts) -> "subprocess.Popen[str]":
    """A client of a Redis on host 1 that keeps nothing on disk."""
    program, address = found_program("redis-server", "apt-get install redis-server"), hosts.rails[0].addresses[1]
    arguments = ["--bind", address, "--port", str(REDIS_PORT), "--save", "", "--appendonly", "no", "--protected-mode", "no"]
    server = hosts.start(1, [program, *arguments], stdout=subprocess.PIPE, text=True)
    _wait_for(server, "Ready to accept connections")
    client = start(hosts, 0, "benchmarks.remote_child", "redis", f"{address}:{REDIS_PORT}")
    answer_of(client)
    return client


def _mooncake(hosts: TwoHosts) -> "subprocess.Popen[str]":
    """A client of Mooncake's store, whose master and memory are on host 1."""
    python = mooncake_python()
    here, there = hosts.rails[0].addresses
    ports = [f"--rpc_port={MOONCAKE_PORT}", f"--metrics_port={MOONCAKE_PORT + 1}"]
    options = ["--default_kv_lease_ttl=1000", "--enable_metric_reporting=0"]
    program = str(MOONCAKE_FOLDER / "bin" / "mooncake_master")
    server = hosts.start(1, [program, *ports, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    _wait_for(server, "Master service started")
    asked: list[subprocess.Popen[str]] = []
    for host, role, address in ((1, "storage", there), (0, "client", here)):
        command = [python, "-m", "benchmarks.mooncake_store_child", role, address, f"{there}:{MOONCAKE_PORT}"]
        pipe = subprocess.PIPE
        asked.append(hosts.start(host, command, stdin=pipe, stdout=pipe, text=True))
        answer_of(asked[-1])
    return asked[-1]


def _wait_for(server: "subprocess.Popen[str]", text: str) -> None:
    assert server.stdout is not None
    for line in server.stdout:
        if text in line:
            return
    raise Trouble(f"{server.args!r} ended before it said {text!r}")


def main() -> int:
    if reason := why_not():
        print(f"puts to other hosts are not measured: {reason}", file=sys.stderr)
        return 0
    return harness.run({"small": small_rows, "shaped": shaped_rows, "unshaped": unshaped_rows}, OUT, may_lack=(Trouble,))


if __name__ == "__main__":
    sys.exit(main())
