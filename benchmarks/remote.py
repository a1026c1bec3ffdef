"""Cost of reads from other hosts' nodes: against a bare frame and iperf3, and of two nodes against one. Part of `make bench-transfer`.

Nodes and clients are processes on two hosts (tests/namespaces.py), joined by rails. For comparisons of links the rails are
shaped: otherwise the two processors, which stand in for twelve hosts, would be the limit. The client checks every value.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kvstore.cli.tools.bench import BenchRow, at_least, at_most, table
from tests.namespaces import TwoHosts, why_not
from tests.transfer.paths.rails_child import answer_of, wait_until_up

ROOT: Final = Path(__file__).resolve().parents[1]
MASTER_PORT: Final = 7440
NODE_PORT: Final = 7450
FRAMES_PORT: Final = 7460
IPERF_PORT: Final = "7470"
SMALL_BYTES: Final = 4096
CALLS: Final = 500
LATENCY_ROUNDS: Final = 5
CLIENTS: Final = 10
CLIENT_BLOCKS: Final = 8
CLIENT_BLOCK_BYTES: Final = 1 << 20
SHARED_GBIT_S: Final = 4
CROWD_S: Final = 4.0
CROWD_ROUNDS: Final = 3
RAILS_GBIT_S: Final = (1, 1)
SPREAD_BLOCKS: Final = 256
SPREAD_BLOCK_BYTES: Final = 256 << 10
SPREAD_S: Final = 2.0
SPREAD_ROUNDS: Final = 3
START_DEADLINE_S: Final = 30.0


def main() -> int:
    Console().print(table(list(rows())))
    return 0


def rows() -> Iterator[BenchRow]:
    """Nothing where two hosts cannot be had."""
    reason = why_not()
    if reason:
        print(f"reads of other hosts are not measured: {reason}", file=sys.stderr)
        return
    for part in (latency_rows, crowd_rows, spread_rows):
        for row in part():
            print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
            yield row


def latency_rows() -> Iterator[BenchRow]:
    """A get of a small value whose place is known, and a frame that is answered by one, taking turns."""
    with TwoHosts((0,)) as hosts, ExitStack() as stack:
        [client] = cluster(hosts, stack)
        frames = f"{hosts.rails[0].addresses[1]}:{FRAMES_PORT}"
        answer_of(start(hosts, 1, "benchmarks.remote_child", "frames", frames))
        [(key, _)] = ask(client, what="put", prefix="small", count=1, block_bytes=SMALL_BYTES)
        gets: list[float] = []
        bare: list[float] = []
        for _ in range(LATENCY_ROUNDS):
            bare.append(statistics.median(ask(client, what="frames", address=frames, calls=CALLS)))
            gets.append(statistics.median(ask(client, what="latency", key=key, block_bytes=SMALL_BYTES, calls=CALLS)))
    yield BenchRow("remote: bare frame, p50", min(bare), "us")
    yield BenchRow("remote: get of 4 KiB, p50", min(gets), "us")
    yield at_most("remote: get of 4 KiB / bare frame", min(gets) / min(bare), "ratio", 2)


def crowd_rows() -> Iterator[BenchRow]:
    """Ten clients that read one node without pause, each blocks of its own, and iperf3's ten streams, taking turns."""
    with TwoHosts((SHARED_GBIT_S,)) as hosts, ExitStack() as stack:
        clients = cluster(hosts, stack, clients=CLIENTS)
        keys = [
            [key for key, _ in ask(client, what="put", prefix=f"of-{i}", count=CLIENT_BLOCKS, block_bytes=CLIENT_BLOCK_BYTES)]
            for i, client in enumerate(clients)
        ]
        _serve_iperf(hosts)
        streams: list[float] = []
        crowds: list[list[float]] = []
        for _ in range(CROWD_ROUNDS):
            streams.append(_iperf(hosts))
            for client, own in zip(clients, keys, strict=True):
                _tell(client, what="read", keys=own, block_bytes=CLIENT_BLOCK_BYTES, seconds=CROWD_S)
            crowds.append([_rate(answer_of(client)) for client in clients])
    best = max(crowds, key=sum)
    yield BenchRow(f"remote: iperf3 -P {CLIENTS} over {SHARED_GBIT_S} Gbit/s", max(streams), "GB/s")
    yield BenchRow(f"remote: {CLIENTS} clients of one node", sum(best), "GB/s")
    yield at_least(f"remote: {CLIENTS} clients of one node / iperf3 -P {CLIENTS}", sum(best) / max(streams), "ratio", 0.9)
    slowest = min(min(rates) / statistics.mean(rates) for rates in crowds)
    yield at_least("remote: slowest client / mean, worst round", slowest, "ratio", 0.5)


def spread_rows() -> Iterator[BenchRow]:
    """One batch that lies on one node, and one that lies on two, each node behind a rail of its own, taking turns."""
    with TwoHosts(RAILS_GBIT_S) as hosts, ExitStack() as stack:
        [client] = cluster(hosts, stack)
        by_node: dict[str, list[str]] = {f"node{i}": [] for i in range(len(hosts.rails))}
        for number in range(1000):
            if min(map(len, by_node.values())) >= SPREAD_BLOCKS:
                break
            for key, node in ask(client, what="put", prefix=f"block-{number}", count=16, block_bytes=SPREAD_BLOCK_BYTES):
                by_node[node].append(key)
        share = SPREAD_BLOCKS // len(by_node)
        on_one = [by_node["node0"][:SPREAD_BLOCKS], by_node["node1"][:SPREAD_BLOCKS]]
        on_two = [key for keys in by_node.values() for key in keys[:share]]
        one: list[float] = []
        two: list[float] = []
        for number in range(SPREAD_ROUNDS):
            one.append(_rate(ask(client, what="read", keys=on_one[number % 2], block_bytes=SPREAD_BLOCK_BYTES, seconds=SPREAD_S)))
            two.append(_rate(ask(client, what="read", keys=on_two, block_bytes=SPREAD_BLOCK_BYTES, seconds=SPREAD_S)))
    yield BenchRow("remote: 256 x 256 KiB on one node", max(one), "GB/s")
    yield BenchRow("remote: 256 x 256 KiB on two nodes", max(two), "GB/s")
    yield at_least("remote: 256 x 256 KiB on two nodes / on one", max(two) / max(one), "ratio", 1.3)


def cluster(hosts: TwoHosts, stack: ExitStack, clients: int = 1) -> "list[subprocess.Popen[str]]":
    """A master and a node behind each rail on host 1, and clients on host 0 that are ready to be asked."""
    wait_until_up(hosts)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-"))
    master = f"{hosts.rails[0].addresses[1]}:{MASTER_PORT}"
    run_dirs = [f"--run-dir={folder}/{name}" for name in ("master", *(f"node{i}" for i in range(len(hosts.rails))))]
    daemons = [start(hosts, 1, "kvstore.master.daemon", f"--listen={master}", "--allow-unauthenticated", run_dirs[0])]
    answer_of(daemons[0])
    for i, rail in enumerate(hosts.rails):
        flags = [
            f"--name=node{i}",
            f"--master={master}",
            f"--listen={rail.addresses[1]}:{NODE_PORT}",
            "--dram=1GiB",
            "--allow-unauthenticated",
            run_dirs[i + 1],
        ]
        daemons.append(start(hosts, 1, "kvstore.store.daemon", *flags, KVSTORE_TRANSFER_RAILS=rail.device))
    for daemon in daemons[1:]:
        while answer_of(daemon)["event"] != "ready":
            pass
    asked = [start(hosts, 0, "benchmarks.remote_child", "client", master) for _ in range(clients)]
    for client in asked:
        answer_of(client)
    return asked


def start(hosts: TwoHosts, host: int, module: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    prefix = ["env", *(f"{name}={value}" for name, value in environment.items())]
    return hosts.start(host, [*prefix, sys.executable, "-m", module, *arguments], stdin=pipe, stdout=pipe, text=True, cwd=ROOT)


def _tell(process: "subprocess.Popen[str]", **question: Any) -> None:
    assert process.stdin is not None
    print(json.dumps(question), file=process.stdin, flush=True)


def ask(process: "subprocess.Popen[str]", **question: Any) -> Any:
    _tell(process, **question)
    return answer_of(process)


def _rate(found: dict[str, float]) -> float:
    """GB/s."""
    assert not found["wrong"], f"{found['wrong']:.0f} blocks arrived wrong"
    return found["bytes"] / found["seconds"] / 1e9


def _serve_iperf(hosts: TwoHosts) -> None:
    server = hosts.start(1, ["iperf3", "-s", "-p", IPERF_PORT, "--forceflush"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    while "listening" not in (line := server.stdout.readline()):
        if not line:
            raise RuntimeError("iperf3 -s has ended")


def _iperf(hosts: TwoHosts) -> float:
    """GB/s from host 1 to host 0, as values go."""
    command = ["iperf3", "-c", hosts.rails[0].addresses[1], "-p", IPERF_PORT, "-R", "-P", str(CLIENTS), "-t", str(int(CROWD_S)), "-J"]
    return float(json.loads(hosts.run(0, command))["end"]["sum_received"]["bits_per_second"]) / 8e9


if __name__ == "__main__":
    sys.exit(main())
