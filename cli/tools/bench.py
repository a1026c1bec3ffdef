"""Benchmark of a cluster through a Client on this host: throughput compared with memcpy, and latency of single calls.

Rounds of both alternate and ratios are of their medians, so a drift of the machine's speed affects both alike. The daemons are other
processes.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from kvstore.cli.tools.tables import new_table
from kvstore.client.control import Control
from kvstore.client.sync import Client
from kvstore.protocol import control_pb2 as pb

Bytes = NDArray[np.uint8]

BLOCKS: Final = 32
BLOCK_BYTES: Final = 1 << 20
ROUNDS: Final = 16
"""Rounds of 32 MiB: 512 MiB of values, more than a processor's cache."""
NEEDED_DRAM_BYTES: Final = 640 << 20
CALLS: Final = 2000
SMALL_BYTES: Final = 4096
SMALL_BLOCKS: Final = 4096
SMALL_ROUNDS: Final = 8
SLEEPS: Final = 300


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One figure. `met` is None for a figure without an aim."""

    name: str
    value: float
    unit: str
    aim: str = ""
    met: bool | None = None


def at_least(name: str, value: float, unit: str, aim: float) -> BenchRow:
    return BenchRow(name, value, unit, f">= {aim:g}", value >= aim)


def at_most(name: str, value: float, unit: str, aim: float) -> BenchRow:
    return BenchRow(name, value, unit, f"<= {aim:g}", value <= aim)


def table(rows: Sequence[BenchRow]) -> Table:
    """Return a table of the rows, with the verdict on each aim."""
    found = new_table("figure", "value", "unit", "aim", "", right=("value",))
    for row in rows:
        verdict = Text("") if row.met is None else Text("met", "green") if row.met else Text("missed", "red")
        found.add_row(row.name, f"{row.value:,.0f}" if row.value >= 1000 else f"{row.value:.3g}", row.unit, row.aim, verdict)
    return found


def measure(client: Client, control: Control) -> Iterator[BenchRow]:
    """Yield all figures as they are measured. Needs NEEDED_DRAM_BYTES of DRAM that this tenant has not used yet; removes its blocks."""
    yield from throughput(client)
    yield from latency(client)
    yield huge_pages(control.status())


def huge_pages(status: pb.StatusReply) -> BenchRow:
    """Share of the nodes' DRAM in huge pages, on which the figures for fresh memory depend."""
    tiers = [tier for node in status.nodes for tier in node.tiers if tier.name == "dram"]
    reasons = sorted({tier.not_huge_reason for tier in tiers if tier.not_huge_reason})
    share = sum(tier.huge_bytes for tier in tiers) / max(sum(tier.capacity_bytes for tier in tiers), 1)
    return BenchRow(f"DRAM in huge pages{''.join(f', {reason}' for reason in reasons)}", 100 * share, "%")


def throughput(client: Client) -> Iterator[BenchRow]:
    """Batches of large values compared with memcpy in one thread, for fresh and used node memory; batches of small values."""
    yield from large_batches(client, BLOCKS, BLOCK_BYTES)
    yield from large_batches(client, BLOCKS // 4, 4 * BLOCK_BYTES)
    yield from small_batches(client)


def large_batches(client: Client, count: int, size_bytes: int) -> Iterator[BenchRow]:
    rng = np.random.default_rng(1)
    sources = [rng.integers(0, 256, size_bytes, dtype=np.uint8) for _ in range(count)]
    arena = np.ones((ROUNDS, count, size_bytes), np.uint8)
    keys = [[os.urandom(16) for _ in range(count)] for _ in range(ROUNDS)]
    with forgotten(client, keys):
        fresh, copied = rounds(lambda i: put_all(client, keys[i], sources), lambda i: copy_all(list(arena[i]), sources))
        forget(client, keys)
        used, copied_again = rounds(lambda i: put_all(client, keys[i], sources), lambda i: copy_all(list(arena[i]), sources))
        buffers = [np.ones(size_bytes, np.uint8) for _ in range(count)]
        get_all(client, keys[0], buffers)  # slabs are mapped on first use
        got, copied_back = rounds(lambda i: get_all(client, keys[i], buffers), lambda i: copy_all(buffers, list(arena[i])))
        get_all(client, keys[0], buffers)
        assert all(bool((buffer == source).all()) for buffer, source in zip(buffers, sources, strict=True))
    gigabytes, what = count * size_bytes / 1e9, f"{count} x {of_size(size_bytes)}"
    yield BenchRow(f"memcpy of {what}, one thread", gigabytes / statistics.median(copied + copied_again + copied_back), "GB/s")
    yield BenchRow(f"put_batch {what}, used memory", gigabytes / statistics.median(used), "GB/s")
    yield BenchRow(f"put_batch {what}, fresh memory", gigabytes / statistics.median(fresh), "GB/s")
    yield BenchRow(f"get_batch_into {what}", gigabytes / statistics.median(got), "GB/s")
    yield at_least(f"put_batch {what} (used) / memcpy", statistics.median(copied_again) / statistics.median(used), "ratio", 0.65)
    yield at_least(f"put_batch {what} (fresh) / memcpy", statistics.median(copied) / statistics.median(fresh), "ratio", 0.65)
    yield BenchRow(f"put_batch {what} fresh / used", statistics.median(used) / statistics.median(fresh), "ratio")
    yield at_least(f"get_batch_into {what} / memcpy", statistics.median(copied_back) / statistics.median(got), "ratio", 0.9)


def small_batches(client: Client) -> Iterator[BenchRow]:
    """Batches of 4,096 values of 4 KiB, in blocks per second."""
    rows = np.random.default_rng(2).integers(0, 256, (SMALL_BLOCKS, SMALL_BYTES), dtype=np.uint8)
    keys = [[os.urandom(16) for _ in range(SMALL_BLOCKS)] for _ in range(SMALL_ROUNDS)]
    with forgotten(client, keys):
        put_s = [seconds(partial(put_all, client, part, rows)) for part in keys]
        into = np.zeros_like(rows)
        for part in keys:
            get_all(client, part, into)  # slabs are mapped on first use
        got_s = [seconds(partial(get_all, client, part, into)) for part in keys]
        assert bool((into == rows).all())
        many = keys[0] + keys[1]
        client.match_prefix(many)
        matched_us = microseconds(lambda: client.match_prefix(many), calls=200)
    yield at_least(f"get_batch_into {SMALL_BLOCKS:,} x 4 KiB", SMALL_BLOCKS / statistics.median(got_s), "blocks/s", 700_000)
    yield at_least(f"put_batch {SMALL_BLOCKS:,} x 4 KiB", SMALL_BLOCKS / statistics.median(put_s), "blocks/s", 300_000)
    yield at_most(f"match_prefix of {2 * SMALL_BLOCKS:,} keys, p50", matched_us / 1000, "ms", 1.5)


def latency(client: Client) -> Iterator[BenchRow]:
    """Median latencies of single calls, in microseconds."""
    large, middle = os.urandom(16), os.urandom(16)
    keys = [os.urandom(16) for _ in range(2 * CALLS + SLEEPS)]
    with forgotten(client, [[*keys, large, middle]]):
        yield from latency_of(client, large, middle, keys)


def latency_of(client: Client, large: bytes, middle: bytes, keys: Sequence[bytes]) -> Iterator[BenchRow]:
    client.put_batch([large, middle], [np.ones(4 << 20, np.uint8), np.ones(64 << 10, np.uint8)])
    large_us, middle_us = alternate(lambda: view_once(client, large), lambda: view_once(client, middle))
    yield at_most("view of 4 MiB, p50", large_us, "us", 8)
    yield at_most("view of 4 MiB after 2 ms of sleep, p50", after_sleep(lambda: view_once(client, large)), "us", 40)
    yield at_most("view of 4 MiB / of 64 KiB", large_us / middle_us, "ratio", 1.1)
    value, buffer = os.urandom(SMALL_BYTES), bytearray(SMALL_BYTES)
    todo = iter(keys)
    yield at_most("put of 4 KiB, p50", microseconds(lambda: client.put(next(todo), value, ack="node")), "us", 60)
    paused_us = after_sleep(lambda: client.put(next(todo), value, ack="node"))
    yield at_most("put of 4 KiB after 2 ms of sleep, p50", paused_us, "us", 160)
    cluster_us = microseconds(lambda: client.put(next(todo), value, ack="cluster"))
    yield at_most('put of 4 KiB with ack="cluster", p50', cluster_us, "us", 300)
    client.get_batch(keys)
    todo = iter(keys)
    yield at_most("get_into of 4 KiB, p50", microseconds(lambda: client.get_into(next(todo), buffer)), "us", 8)
    todo = iter(keys)
    yield at_most("get of 4 KiB, p50", microseconds(lambda: client.get(next(todo))), "us", 14)
    yield at_most("exists of 1 key, p50", microseconds(lambda: client.exists(keys[0])), "us", 4)
    many_us = microseconds(lambda: client.exists_batch(keys[:1024]), calls=500)
    yield BenchRow("exists of 1,024 keys, p50", many_us, "us")
    yield at_least("exists of 1,024 keys", 1024 / many_us, "M keys/s", 2)


def rounds(ours: Callable[[int], None], peer: Callable[[int], None]) -> tuple[list[float], list[float]]:
    """Run both functions alternately; return the seconds of each round of either."""
    taken = [(seconds(partial(ours, i)), seconds(partial(peer, i))) for i in range(ROUNDS)]
    return [ours_s for ours_s, _ in taken], [peer_s for _, peer_s in taken]


def microseconds(function: Callable[[], object], *, calls: int | None = None, pause_s: float = 0.0) -> float:
    """Return the median of `calls` calls (default: CALLS), each after a pause."""
    taken = []
    for _ in range(calls or CALLS):
        if pause_s:
            time.sleep(pause_s)
        taken.append(seconds(function))
    return statistics.median(taken) * 1e6


def after_sleep(function: Callable[[], object]) -> float:
    """Return the median of calls after 2 ms of sleep each, that is with cold processor caches."""
    return microseconds(function, calls=SLEEPS, pause_s=0.002)


def of_size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


def seconds(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def alternate(first: Callable[[], None], second: Callable[[], None]) -> tuple[float, float]:
    """Call two functions alternately; return their medians in microseconds."""
    taken = [(seconds(first), seconds(second)) for _ in range(CALLS)]
    medians = [statistics.median(times) * 1e6 for times in zip(*taken, strict=True)]
    return medians[0], medians[1]


def put_all(client: Client, keys: Sequence[bytes], sources: Sequence[Bytes] | Bytes) -> None:
    if not all(client.put_batch(keys, sources)):
        raise AssertionError("a new key existed already")


def get_all(client: Client, keys: Sequence[bytes], buffers: Any) -> None:
    if None in client.get_batch_into(keys, buffers):
        raise AssertionError(f"a block was evicted: the benchmark needs {NEEDED_DRAM_BYTES >> 20} MiB of DRAM for itself")


def copy_all(destinations: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        destination[:] = source


def view_once(client: Client, key: bytes) -> None:
    with client.view(key) as memory:
        if memory is None:
            raise AssertionError("the block was evicted")


@contextmanager
def forgotten(client: Client, keys: Sequence[Sequence[bytes]]) -> Iterator[None]:
    """Remove the keys on exit, also after an interrupt: they are in no namespace by which they could be removed later."""
    try:
        yield
    finally:
        forget(client, keys)


def forget(client: Client, keys: Sequence[Sequence[bytes]]) -> None:
    for part in keys:
        client.remove(part, force=True)
