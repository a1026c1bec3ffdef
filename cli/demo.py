"""`kvstore demo`: runs conversations through a small local cluster, kills and restarts a node, and compares every byte.

Each claim that it prints is checked in the same run; a claim that fails makes the demo fail.
"""

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import click
from rich.console import Console
from rich.text import Text

from kvstore.cli.tools.cluster import LONG_DEMOTION_WAIT_S, ClusterPlan, LocalCluster
from kvstore.cli.tools.replay import run_replay, settled_status
from kvstore.cli.tools.status_tables import nodes_table, status_lines
from kvstore.cli.tools.tables import duration, percent
from kvstore.client.block_bytes import BlockArena, block_key
from kvstore.client.config import ClientSettings
from kvstore.client.sync import Client
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.kvcache.traces.named import generate
from kvstore.protocol.settings import Size, format_size, parse_size

BLOCK_BYTES: Final = Size(8 << 10)
PLAN: Final = ClusterPlan(dram="64MiB", nvme="1GiB", demotion_wait_s=LONG_DEMOTION_WAIT_S, is_private=True)
SEED: Final = 1
BATCH: Final = 1024

FAILED_STATUS: Final = 1
MIN_REQUESTS: Final = 1000
"""With fewer requests DRAM does not overflow, and no block is on NVMe for the recovery."""


@dataclass(slots=True)
class Recovery:
    """State of the blocks that were stored before the kill, as block ids."""

    on_nvme: set[int]
    elsewhere: set[int]
    found: set[int]
    wrong_bytes: int


class Demo:
    """One run: two thirds of the requests before the kill, the rest after it.

    `is_right` is False once a claim has failed.
    """

    def __init__(self, console: Console, *, requests: int, plan: ClusterPlan) -> None:
        self._console = console
        self._plan = plan
        self._requests = list(itertools.islice(generate(seed=SEED), requests))
        self._kill_at = requests * 2 // 3
        self._known: set[int] = set()
        self.is_right = True

    def run(self, on_log: Callable[[str, str], None]) -> None:
        """Run all chapters. Raises the errors of LocalCluster and Client."""
        self._chapter("1", f"A cluster: a master, and a node with {_shown(self._plan.dram)} of DRAM and {_shown(self._plan.nvme)} of NVMe")
        with LocalCluster(self._plan, on_log=on_log) as cluster:
            cluster.wait_ready()
            with cluster.control() as control:
                self._console.print(nodes_table(control.status()))
            self._converse(cluster, "2", self._requests[: self._kill_at])
            self._crash(cluster)
            self._converse(cluster, "4", self._requests[self._kill_at :])
            with cluster.control() as control:
                self._chapter("5", "At the end")
                self._console.print(status_lines(control.status()))

    # --- chapters ---

    def _converse(self, cluster: LocalCluster, number: str, requests: Sequence[TraceRequest]) -> None:
        blocks = sum(len(request.hash_ids) for request in requests)
        self._chapter(number, f"{len(requests):,} prompts of generated conversations, {blocks:,} blocks of {format_size(BLOCK_BYTES)}")
        report = run_replay(_settings_of(cluster), requests, total=len(requests), block_bytes=BLOCK_BYTES, cluster=cluster)
        self._console.print(report.as_table())
        counts = report.counts
        self._claim(f"{counts.hits:,} blocks were read back, every byte as stored", counts.wrong_bytes == 0)
        best = best_prefix_hits(requests, self._known)
        saved = percent(counts.prefix_hits, counts.blocks)
        self._claim(f"{saved} need no prefill: every block that was stored and not lost", counts.prefix_hits == best > 0)

    def _crash(self, cluster: LocalCluster) -> None:
        self._chapter("3", f"kill -9 of the node (pid {cluster.nodes[0].pid}), and its restart")
        ids = list(dict.fromkeys(block for request in self._requests[: self._kill_at] for block in request.hash_ids))
        with Client(settings=_settings_of(cluster)) as client:
            on_nvme, elsewhere = locate_blocks(client, ids)
            cluster.kill_node(0)
            gone = sum(size is not None for size in read(client, ids[:BATCH])[0])
            self._claim("while it is down every read is a miss, none is an error", gone == 0)
            cluster.restart_node(0)
            cluster.wait_ready()
            with cluster.control() as control:
                self._console.print(nodes_table(settled_status(control)))
        with Client(settings=_settings_of(cluster)) as client:
            self.judge(recovered(client, ids, on_nvme, elsewhere))

    def judge(self, recovery: Recovery) -> None:
        """Check the claims about the recovery."""
        back = len(recovery.on_nvme & recovery.found)
        self._claim(f"{back:,} of {len(recovery.on_nvme):,} blocks that were on NVMe are served again", recovery.on_nvme <= recovery.found)
        lost = len(recovery.elsewhere - recovery.found)
        self._claim(f"{lost:,} blocks that were in DRAM alone are misses", not recovery.elsewhere & recovery.found)
        self._claim(f"{recovery.wrong_bytes} wrong bytes in {len(recovery.found):,} blocks read after the crash", not recovery.wrong_bytes)
        self._claim("NVMe held blocks at the time of the crash", bool(recovery.on_nvme))
        self._known = recovery.found

    def _chapter(self, number: str, title: str) -> None:
        self._console.print()
        self._console.print(Text.assemble((f"{number}  ", "bold cyan"), (title, "bold")))

    def _claim(self, text: str, holds: bool) -> None:
        mark = ("✔ ", "bold green") if holds else ("✘ NOT SO: ", "bold red")
        self._console.print(Text.assemble("   ", mark, text))
        self.is_right = self.is_right and holds


def _shown(size: str) -> str:
    return format_size(parse_size(size))


def best_prefix_hits(requests: Sequence[TraceRequest], known: set[int]) -> int:
    """Prefix hits of an ideal store that starts with `known` and never evicts. Adds the requests' blocks to `known`."""
    hits = 0
    for request in requests:
        hits += sum(1 for _ in itertools.takewhile(known.__contains__, request.hash_ids))
        known.update(request.hash_ids)
    return hits


def locate_blocks(client: Client, ids: Sequence[int]) -> tuple[set[int], set[int]]:
    """Return the blocks with a copy on NVMe, and the stored blocks without one."""
    on_nvme: set[int] = set()
    elsewhere: set[int] = set()
    located = client.locate([block_key(block, BLOCK_BYTES) for block in ids])
    for block, locations in zip(ids, located, strict=True):
        if any("nvme" in location.tiers for location in locations):
            on_nvme.add(block)
        elif locations:
            elsewhere.add(block)
    return on_nvme, elsewhere


def recovered(client: Client, ids: Sequence[int], on_nvme: set[int], elsewhere: set[int]) -> Recovery:
    """Read all blocks and compare their bytes."""
    recovery = Recovery(on_nvme, elsewhere, set(), 0)
    for start in range(0, len(ids), BATCH):
        part = ids[start : start + BATCH]
        sizes, wrong_bytes = read(client, part)
        recovery.found.update(block for block, size in zip(part, sizes, strict=True) if size is not None)
        recovery.wrong_bytes += wrong_bytes
    return recovery


def read(client: Client, ids: Sequence[int]) -> tuple[list[int | None], int]:
    """Return the sizes of the blocks, None for misses, and the number of wrong bytes in those found."""
    arena, expected = BlockArena(len(ids), BLOCK_BYTES), BlockArena(len(ids), BLOCK_BYTES)
    expected.make(ids)
    sizes = client.get_batch_into([block_key(block, BLOCK_BYTES) for block in ids], arena.views)
    wrong = arena.wrong_bytes(expected, len(ids))
    return sizes, sum(int(count) for count, size in zip(wrong, sizes, strict=True) if size is not None)


def _settings_of(cluster: LocalCluster) -> ClientSettings:
    """Settings for the demo's own cluster; the environment is ignored."""
    return ClientSettings(master=cluster.address, is_loaded=True)


@click.command(short_help="Run a demonstration on a local cluster; needs no setup.")
@click.option("--requests", type=click.IntRange(min=MIN_REQUESTS), default=3000, show_default=True, metavar="N", help="Number of prompts.")
def demo(requests: int) -> None:
    """Run a demonstration on this machine: conversations, a node that is killed and restarted, every byte compared.

    The demo starts a small cluster of its own and needs no setup. Exit status 0 only if all of its claims held.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    begin = time.perf_counter()
    log: list[str] = []
    show = Demo(console, requests=requests, plan=PLAN)
    show.run(on_log=lambda name, line: log.append(f"{name} | {line}"))
    seconds = time.perf_counter() - begin
    console.print()
    if not show.is_right:
        console.print("\n".join(log[-40:]), style="dim")
        console.print(Text("Some claims failed: see above.", style="bold red"))
        sys.exit(FAILED_STATUS)
    console.print(Text(f"All claims held, in {duration(seconds)}.", style="bold green"))
