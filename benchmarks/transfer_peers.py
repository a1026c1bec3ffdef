"""Peers that the transfer engine is compared with, each measured by its own tool: memcpy, iperf3, Mooncake's engine, UCX, ucxx and NIXL.

`python -m benchmarks.transfer_peers` prints them all. Every peer that moves bytes between processes does so here between two real
ones on this machine. A peer that is not installed is a row that says what to install; nothing is raised.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.peer_child import BLOCKS, HALF_BYTES, SMALL_BYTES, arena
from benchmarks.peer_pair import ROOT, PeerPair
from kvstore.cli.tools.bench import BenchRow, table
from tests.ports import free_ports

BLOCK_SIZES: Final = (1 << 20, 4 << 20)
STREAMS: Final = (1, 2, 4)
ROUNDS: Final = 5
SECONDS: Final = 0.4
"""Of one figure in one round: shorter than most disturbances by other processes, long beside a batch."""
QUIET_DEADLINE_S: Final = 10.0
QUIET_SHARE: Final = 0.9
ROUND_BYTES: Final = 1 << 30
"""Moved in one round by tools that want an amount, not a time."""
TOOL_DEADLINE_S: Final = 30.0
INSTALL_DEADLINE_S: Final = 300.0
MOONCAKE_PACKAGE: Final = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
MOONCAKE_FOLDER: Final = ROOT / "build" / "mooncake"
MOONCAKE_LIBRARIES: Final = "apt-get install libibverbs1 libnuma1 libcurl4"
WAYS: Final = {
    "TCP": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
    "shared memory": {"UCX_TLS": "shm,cma,self,tcp", "UCX_NET_DEVICES": "lo"},
}
"""Name -> what makes UCX go that way. With shared memory, TCP only connects."""
MIB: Final = float(1 << 20)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one peer in one round. `trouble` has the reason for a failure: the package to install, or the output."""

    rows: tuple[BenchRow, ...] = ()
    trouble: str = ""


class Peer(NamedTuple):
    """Something that can be measured again and again. `measure` raises nothing that a missing or failing peer causes."""

    name: str
    measure: Callable[[], Figures]


class Trouble(Exception):
    """A peer cannot be measured; the message says what to do. Never leaves this file."""


def main() -> int:
    with peers() as found:
        rows, troubles = take_turns(found, ROUNDS)
    Console().print(table(rows))
    for name, trouble in troubles.items():
        print(f"{name}: {trouble}", file=sys.stderr)
    return 0


@contextmanager
def peers() -> Iterator[list[Peer]]:
    """All of them; processes that stay up between rounds end with the context."""
    with ExitStack() as stack:
        found = [peer("memcpy", memcpy)]
        found += [peer(f"iperf3 -P {streams}", partial(iperf3, streams)) for streams in STREAMS]
        found.append(paired(stack, "Mooncake, TCP", "benchmarks.mooncake_child", mooncake_python, {}))
        found.append(peer("ucxx send_recv, TCP", ucxx_send_recv))
        for way, environment in WAYS.items():
            found.append(peer(f"ucx_perftest, {way}", partial(ucx_perftest, way)))
            found.append(paired(stack, f"NIXL, {way}", "benchmarks.nixl_child", nixl_python, environment))
        yield found


def take_turns(measured: Sequence[Peer], rounds: int) -> tuple[list[BenchRow], dict[str, str]]:
    """Return the best of each figure over rounds in which all peers take turns, and the errors of peers without a figure.

    Best, not median: a disturbance comes from outside, only slows a round, and hits a random peer. Each round begins with another peer, so
    that no peer always follows the same one.
    """
    best: dict[str, BenchRow] = {}
    troubles: dict[str, str] = {}
    shown: set[str] = set()
    for i in range(rounds):
        first = i % len(measured)
        for name, measure in [*measured[first:], *measured[:first]]:
            wait_for_quiet()
            begun = time.monotonic()
            figures = measure()
            told = ", ".join(f"{row.name} {row.value:.3g} {row.unit}" for row in figures.rows) or figures.trouble
            print(f"round {i + 1}, {time.monotonic() - begun:.1f} s: {told}", file=sys.stderr, flush=True)
            if figures.trouble:
                troubles[name] = figures.trouble
            else:
                shown.add(name)
            for row in figures.rows:
                best[row.name] = better(best.get(row.name, row), row)
    in_order = sorted(best.values(), key=lambda row: [row.name.startswith(name) for name, _ in measured], reverse=True)
    return in_order, {name: trouble for name, trouble in troubles.items() if name not in shown}


def wait_for_quiet() -> None:
    """Return when no other process uses the processors, or after QUIET_DEADLINE_S.

    Peers that poll, on as many processors as they have processes, lose nine tenths of their speed to one more process at work.
    """
    until_s = time.monotonic() + QUIET_DEADLINE_S
    while time.monotonic() < until_s:
        before = processor_times()
        threading.Event().wait(0.1)
        total, idle = processor_times() - before
        if idle > QUIET_SHARE * total:
            return


def processor_times() -> NDArray[np.int64]:
    """(all, idle) ticks of all processors since the machine started."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return np.array([sum(ticks), ticks[3] + ticks[4]])


def better(one: BenchRow, other: BenchRow) -> BenchRow:
    """More of everything but of microseconds."""
    return min(one, other, key=lambda row: row.value if row.unit == "us" else -row.value)


def peer(name: str, measure: Callable[[], tuple[BenchRow, ...]]) -> Peer:
    return Peer(name, partial(reported, measure))


def reported(measure: Callable[[], tuple[BenchRow, ...]]) -> Figures:
    """Its rows, or why it has none."""
    try:
        return Figures(measure())
    except (Trouble, OSError, RuntimeError, ValueError, LookupError, subprocess.SubprocessError) as error:
        return Figures(trouble=str(error) or type(error).__name__)


def paired(stack: ExitStack, name: str, module: str, python: Callable[[], str], environment: dict[str, str]) -> Peer:
    """A peer that is measured by its own pair of processes, started now. One that does not start says why, each round."""
    try:
        pair = stack.enter_context(PeerPair(module, python=python(), environment=environment))
    except (Trouble, OSError, RuntimeError, subprocess.SubprocessError) as error:
        trouble = Figures(trouble=str(error))
        return Peer(name, lambda: trouble)
    return peer(name, partial(pair_rows, name, pair))


def pair_rows(name: str, pair: PeerPair) -> tuple[BenchRow, ...]:
    rows = [
        BenchRow(f"{name}: {operation} {BLOCKS} x {block_bytes >> 20} MiB", pair.gb_s(operation, block_bytes, SECONDS), "GB/s")
        for operation in ("read", "write")
        for block_bytes in BLOCK_SIZES
    ]
    p50, p99 = pair.latency_us()
    return (*rows, BenchRow(f"{name}: read 4 KiB, p50", p50, "us"), BenchRow(f"{name}: read 4 KiB, p99", p99, "us"))


def memcpy() -> tuple[BenchRow, ...]:
    """One thread that copies batches of blocks between two warm arenas, by numpy."""
    memory = arena(seed=1)
    source, sink = memory[:HALF_BYTES], memory[HALF_BYTES:]
    rows = []
    for block_bytes in BLOCK_SIZES:
        sources, sinks = source.reshape(-1, block_bytes), sink.reshape(-1, block_bytes)
        copied, begun = 0, time.perf_counter()
        while (taken := time.perf_counter() - begun) < SECONDS:
            for _ in range(BLOCKS):
                np.copyto(sinks[copied % len(sinks)], sources[copied % len(sinks)])
                copied += 1
        rows.append(BenchRow(f"memcpy: {BLOCKS} x {block_bytes >> 20} MiB", copied * block_bytes / taken / 1e9, "GB/s"))
    return tuple(rows)


def iperf3(streams: int) -> tuple[BenchRow, ...]:
    """A second of iperf3 over the loopback, with its own buffer sizes."""
    program = found_program("iperf3", "apt-get install iperf3")
    (port,) = free_ports(1)
    with serving([program, "-s", "-1", "-p", str(port)], port, {}):
        answer = tool([program, "-c", "127.0.0.1", "-p", str(port), "-P", str(streams), "-t", "1", "-J"], {})
    bits_s = json.loads(answer)["end"]["sum_received"]["bits_per_second"]
    return (BenchRow(f"iperf3 -P {streams}", bits_s / 8e9, "GB/s"), BenchRow(f"iperf3 -P {streams}, bits", bits_s / 1e9, "Gbit/s"))


def ucx_perftest(way: str) -> tuple[BenchRow, ...]:
    """UCX's own tool, in C, on one buffer that stays in the processor's cache: tagged messages, then one-sided reads ("get")."""
    rows = []
    for test, label in (("tag_bw", "tagged"), ("ucp_get", "get")):
        for block_bytes in BLOCK_SIZES:
            mib_s = perftest(way, test, block_bytes, ROUND_BYTES // block_bytes)["overall_bw"]
            rows.append(BenchRow(f"ucx_perftest, {way}: {label} {block_bytes >> 20} MiB", mib_s * MIB / 1e9, "GB/s"))
    for rank in (50, 99):
        found = perftest(way, "ucp_get", SMALL_BYTES, 1000, "-R", str(rank))
        rows.append(BenchRow(f"ucx_perftest, {way}: get 4 KiB, p{rank}", found[f"{rank}.0_percentile_lat"], "us"))
    return tuple(rows)


def perftest(way: str, test: str, size_bytes: int, count: int, *options: str) -> dict[str, float]:
    """One run of ucx_perftest: its last line of figures, by its own names; its megabytes are of 2^20 bytes."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        raise Trouble("UCX is not installed: pip install '.[ucx]'")
    folder = Path(spec.origin).parent
    environment = {**WAYS[way], "LD_LIBRARY_PATH": str(folder / "lib")}
    program = str(folder / "bin" / "ucx_perftest")
    (port,) = free_ports(1)
    with serving([program, "-p", str(port)], port, environment):
        amounts = ["-s", str(size_bytes), "-n", str(count), "-w", "20"]
        answer = tool([program, "127.0.0.1", "-p", str(port), "-t", test, *amounts, "-f", "-v", *options], environment)
    names, *_, values = answer.strip().splitlines()
    return dict(zip(names.split(","), map(float, values.split(",")), strict=True))


def ucxx_send_recv() -> tuple[BenchRow, ...]:
    """ucxx's own round trips of one numpy array over TCP, polling: faster than its blocking and thread modes.

    Not over shared memory: it connects by IP address, and UCX then uses TCP in any case (UCX_LOG_LEVEL=info shows it).
    """
    if importlib.util.find_spec("ucxx") is None:
        raise Trouble("ucxx is not installed: pip install '.[ucx]'")
    name = "ucxx send_recv, TCP"
    rows = [BenchRow(f"{name}: {size >> 20} MiB", size / one_way_ns(size, ROUND_BYTES // 4 // size), "GB/s") for size in BLOCK_SIZES]
    return (*rows, BenchRow(f"{name}: 4 KiB one way, p50", one_way_ns(SMALL_BYTES, 1000) / 1000, "us"))


def one_way_ns(size_bytes: int, count: int) -> float:
    """Half of the median round trip that ucxx's benchmark reports."""
    options = ["-l", "ucxx-core", "-o", "numpy", "--progress-mode", "polling", "--reuse-alloc", "--no-detailed-report", "-s", "127.0.0.1"]
    amounts = ["-n", str(size_bytes), "--n-iter", str(count), "--n-warmup-iter", "20"]
    answer = tool([sys.executable, "-m", "ucxx.benchmarks.send_recv", *options, *amounts], WAYS["TCP"])
    found = re.search(r"Latency \(median\) *\| (\d+) ns", answer)
    if found is None:
        raise Trouble(f"ucxx's benchmark printed no median latency: {answer[-200:]}")
    return float(found[1])


def nixl_python() -> str:
    if importlib.util.find_spec("nixl_cu12") is None:
        raise Trouble("NIXL is not installed: pip install '.[nixl]'")
    return sys.executable


def mooncake_python() -> str:
    """The Python of an environment of Mooncake's own, made on first use: it pins and brings what we do not want in ours."""
    python = str(MOONCAKE_FOLDER / "bin" / "python")
    if not os.path.exists(python):
        tool([sys.executable, "-m", "venv", str(MOONCAKE_FOLDER)], {}, deadline_s=INSTALL_DEADLINE_S)
    if subprocess.run([python, "-m", "pip", "show", "-q", MOONCAKE_PACKAGE.split("==")[0]], capture_output=True, check=False).returncode:
        tool([python, "-m", "pip", "install", "-q", "numpy", MOONCAKE_PACKAGE], {}, deadline_s=INSTALL_DEADLINE_S)
    try:
        tool([python, "-c", "import mooncake.engine"], {})
    except Trouble as error:
        raise Trouble(f"Mooncake's engine wants its libraries ({MOONCAKE_LIBRARIES}): {error}") from error
    return python


def found_program(name: str, install: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise Trouble(f"{name} is not installed: {install}")
    return path


def tool(command: Sequence[str], environment: dict[str, str], *, deadline_s: float = TOOL_DEADLINE_S) -> str:
    """Return a command's output. Raises Trouble with the end of the output at a failure, subprocess.TimeoutExpired."""
    ours = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False, env=ours)
    if done.returncode:
        raise Trouble(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout


@contextmanager
def serving(command: Sequence[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    """A server process that listens on `port` from the beginning to the end of the context. Raises Trouble when it does not."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=os.environ | environment)
    try:
        until_s = time.monotonic() + TOOL_DEADLINE_S
        while not is_listening(port):
            if process.poll() is not None or time.monotonic() > until_s:
                raise Trouble(f"{' '.join(command)} does not listen")
            threading.Event().wait(0.01)
        yield
    finally:
        process.kill()
        process.wait()


def is_listening(port: int) -> bool:
    """Return whether someone listens on that TCP port. Read from the kernel's list: connecting would use up a server that serves once."""
    state = f":{port:04X} "
    lines = [line for path in ("/proc/net/tcp", "/proc/net/tcp6") for line in Path(path).read_text().splitlines()]
    return any(state in line and " 0A " in line for line in lines)


if __name__ == "__main__":
    sys.exit(main())
