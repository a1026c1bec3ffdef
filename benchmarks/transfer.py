"""`make bench-transfer`: the transfer engine against everything that transfer_peers.py knows, all taking turns in one run.

Our engine is measured like its peers, between two processes, every batch compared (peer_child.py). Both sides of a ratio are the best
of all rounds. Needs about 12 GiB of memory. Then reads of other hosts' nodes: remote.py. Rows go to benchmarks/out/transfer.json.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import remote
from benchmarks.harness import write
from benchmarks.peer_child import BLOCKS
from benchmarks.transfer_peers import BLOCK_SIZES, ROUNDS, STREAMS, WAYS, Peer, paired, peers, take_turns
from kvstore.cli.tools.bench import BenchRow, at_least, table
from kvstore.transfer.config import TransferSettings

OUT: Final = Path(__file__).parent / "out" / "transfer.json"
OPERATIONS: Final = ("read", "write")
TCP_AIM: Final = 1.0
COPY_AIM: Final = 0.8
"""Of memcpy, and of UCX's and NIXL's own tools."""
MOONCAKE_AIM: Final = 2.0
UCX_WAYS: Final[Mapping[str, Mapping[str, str]]] = {"TCP": {}, "shared memory": {"UCX_TLS": "shm,cma,self"}}
"""Changes of WAYS for this engine: over TCP it makes UCX detect errors, which UCX's shared memory does not support."""


def main() -> int:
    rows, troubles = measure(ROUNDS)
    rows += remote.rows()
    Console().print(table(rows))
    for name, trouble in troubles.items():
        print(f"{name}: {trouble}", file=sys.stderr)
    write(rows, OUT)
    return 0


def measure(rounds: int) -> tuple[list[BenchRow], dict[str, str]]:
    """All figures, then the ratios of those that there are; and why the others are missing, by peer."""
    with ExitStack() as stack:
        rows, troubles = take_turns([*ours(stack), *stack.enter_context(peers())], rounds)
    return [*rows, *ratios({row.name: row.value for row in rows})], troubles


def ours(stack: ExitStack) -> Iterator[Peer]:
    for streams in STREAMS:
        yield engine(stack, tcp(streams), "tcp", {"KVSTORE_TRANSFER_TCP_STREAMS": str(streams)})
    yield engine(stack, "kvstore shm", "shm", {})
    for way, environment in WAYS.items():
        yield engine(stack, f"kvstore ucx, {way}", "ucx", {**environment, **UCX_WAYS[way]})
        yield engine(stack, f"kvstore nixl, {way}", "nixl", environment)


def engine(stack: ExitStack, name: str, transport: str, environment: Mapping[str, str]) -> Peer:
    """Both processes with one transport, over the loopback."""
    settings = {"KVSTORE_TRANSFER_TRANSPORTS": transport, "KVSTORE_TRANSFER_RAILS": "lo"}
    return paired(stack, name, "benchmarks.kvstore_child", lambda: sys.executable, {**settings, **environment})


def tcp(streams: int) -> str:
    return f"kvstore tcp, streams: {streams}"


def ratios(found: Mapping[str, float]) -> Iterator[BenchRow]:
    """Ours to theirs, for each operation and size of which both sides were measured."""
    for streams in STREAMS:
        yield from against(found, tcp(streams), f"iperf3 -P {streams}", "", TCP_AIM)
    yield from against(found, "kvstore shm", "memcpy", ": {blocks} x {mib} MiB", COPY_AIM)
    yield from against(found, "kvstore ucx, TCP", "ucxx send_recv, TCP", ": {mib} MiB", COPY_AIM)
    yield from against(found, "kvstore ucx, shared memory", "ucx_perftest, shared memory", ": tagged {mib} MiB", COPY_AIM)
    for way in WAYS:
        yield from against(found, f"kvstore nixl, {way}", f"NIXL, {way}", ": {operation} {blocks} x {mib} MiB", COPY_AIM)
    default = tcp(TransferSettings().tcp_streams)
    yield from against(found, default, "Mooncake, TCP", ": {operation} {blocks} x {mib} MiB", MOONCAKE_AIM)


def against(found: Mapping[str, float], one: str, other: str, figure: str, aim: float) -> Iterator[BenchRow]:
    """`figure` is what follows the other's name in the row that ours is compared with."""
    for operation in OPERATIONS:
        for block_bytes in BLOCK_SIZES:
            mib = block_bytes >> 20
            mine = found.get(f"{one}: {operation} {BLOCKS} x {mib} MiB")
            theirs = found.get(other + figure.format(operation=operation, blocks=BLOCKS, mib=mib))
            if mine is not None and theirs:
                yield at_least(f"{one} / {other}: {operation} {mib} MiB", mine / theirs, "ratio", aim)


if __name__ == "__main__":
    sys.exit(main())
