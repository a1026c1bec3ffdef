"""`make bench-pool`: the memory of four nodes as one pool, live. The public conversation trace is replayed against four nodes with
DRAM for 2,500 blocks each, and against one node of 10,000; the same with DRAM and NVMe. Every byte is checked. Writes
benchmarks/out/pool.json.

Each prompt is read and stored by one of four clients, each at a node of its own. Shares of the prompts: all at one node, 80/10/5/5 %,
25 % each, and routed to the node that holds most of the prompt (as Algorithm 1 does without load). The trace runs PACE times faster than
it was recorded: policies look at the clock, and copies to home nodes take real time. So each replay is compared with the lab, which
gets the prompts at the times at which the nodes got them. The trace at its own pace is another case.

POOL_PARTS selects parts by name, separated by commas; POOL_REQUESTS and POOL_PACE shorten a run.
"""

import dataclasses
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.harness import write
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow, at_least, at_most, table
from kvstore.cli.tools.cluster import LONG_DEMOTION_WAIT_S, ClusterPlan, LocalCluster
from kvstore.cli.tools.replay import StoreReplay
from kvstore.client import Client
from kvstore.client.block_bytes import block_key
from kvstore.kvcache.traces.mooncake import TraceRequest, read_trace
from kvstore.kvcache.traces.named import generate
from kvstore.lab.home_pool import HomePool, HomePoolOptions
from kvstore.lab.replay import CacheReplay
from kvstore.lab.tiers import TwoTiers

OUT: Final = Path(__file__).parent / "out" / "pool.json"
TRACE: Final = Path(__file__).parents[2] / "shared/data/traces/conversation_trace.jsonl"
NODES: Final = 4
NODE_BLOCKS: Final = 2500
BLOCK_BYTES: Final = 4096
PACE: Final = 40.0
"""An hour in 90 seconds."""
REQUESTS: Final = 12_031
"""As many as the trace has."""
AIM: Final = 0.225
LOCAL_AIM: Final = 0.6
DRAM_BLOCKS: Final = 250
"""Of each node with two tiers, whose NVMe has NODE_BLOCKS."""
TIERED_SHARE_AIM: Final = 0.95
"""Least hit ratio of four nodes with two tiers, relative to one of the same total size."""
OFF_LAB_AIM: Final = 0.005
COPY_S: Final = 0.1
"""Time of a copy to a home node, about, for the lab."""
POLICY: Final = "prefix"


@dataclass(frozen=True, slots=True)
class Result:
    """Of one replay."""

    ratio: float
    local: float
    """Share of the prefix hits that the reader's own node held."""
    late_s: float
    """By how much a request was behind its time, at most."""
    copied_bytes: int
    hits: int
    dram_hits: int
    """Of hits at any position, those from DRAM."""
    as_sent: Sequence[TraceRequest]
    """The prompts at the times at which they were sent."""


def replay(
    requests: Sequence[TraceRequest],
    *,
    nodes: int,
    dram_blocks: int,
    shares: Sequence[float],
    pace: float,
    is_routed: bool = False,
    nvme_blocks: int = 0,
) -> Result:
    """Replay the trace; `shares` are the weights of the nodes' clients. Raises AssertionError: wrong bytes."""
    nvme = str(nvme_blocks * BLOCK_BYTES) if nvme_blocks else ""
    wait = LONG_DEMOTION_WAIT_S if nvme_blocks else ""  # a DRAM tier of 1 MiB cannot absorb a burst
    plan = ClusterPlan(is_private=True, nodes=nodes, dram=str(dram_blocks * BLOCK_BYTES), nvme=nvme, policy=POLICY, demotion_wait_s=wait)
    as_sent: list[TraceRequest] = []
    rng = random.Random(1)
    with LocalCluster(plan, on_log=show_warning) as cluster:
        cluster.wait_warm()
        with Client(cluster.address) as client:
            members = sorted((node["name"], node["node_id"]) for node in client.status()["nodes"])
        clients = [_tied(cluster.address, node_id) for _name, node_id in members]
        ids = [node_id for _name, node_id in members]
        replays = [StoreReplay(client, block_bytes=BLOCK_BYTES) for client in clients]
        begin, late_s, local, hits = time.monotonic(), 0.0, 0, 0
        for request in requests:
            due = begin + request.timestamp_ms / 1000 / pace
            now = time.monotonic()
            if now < due:
                time.sleep(due - now)
            late_s = max(late_s, now - due)
            keys = [block_key(block, BLOCK_BYTES) for block in request.hash_ids]
            chosen = rng.choices(range(nodes), shares)[0]
            holders = _holders(clients[0], keys)
            if is_routed and holders:
                counts = [sum(node_id in at for at in holders) for node_id in ids]
                if max(counts) > 1:
                    chosen = counts.index(max(counts))
            local += sum(ids[chosen] in at for at in holders)
            hits += len(holders)
            as_sent.append(dataclasses.replace(request, timestamp_ms=(time.monotonic() - begin) * 1000))
            replays[chosen].request(request.hash_ids)
            assert not replays[chosen].counts.wrong_bytes, replays[chosen].counts.wrong_block
        copied = clients[0].status()["counters"].get("home_copied_bytes", 0)
        dram_hits = sum(client.stats().hits_by_tier["dram"] for client in clients)
        for client in clients:
            client.close()
    blocks = sum(one.counts.blocks for one in replays)
    found = sum(one.counts.prefix_hits for one in replays)
    return Result(found / blocks, local / max(1, hits), late_s, copied, found, dram_hits, as_sent)


def _tied(address: str, node_id: int) -> Client:
    """A client whose node is that one, as if it ran on the node's host."""
    client = Client(address)
    client.exists(b"nothing")  # learns the nodes
    client._operations.resources.daemons.nodes.local_id = node_id
    return client


def _holders(client: Client, keys: list[bytes]) -> list[list[int]]:
    """The nodes of each block before the prompt's first miss."""
    found = [[location.node_id for location in locations] for locations in client.locate(keys)]
    return found[: found.index([])] if [] in found else found


def main() -> int:
    limit = int(os.environ.get("POOL_REQUESTS", "0")) or None
    pace = float(os.environ.get("POOL_PACE", PACE))
    requests = list(itertools.islice(read_trace(TRACE) if TRACE.exists() else generate(seed=2026), limit or REQUESTS))
    rows: list[BenchRow] = []

    def row(name: str, result: Result, lab: float) -> None:
        aimed = at_least(f"{name}: prefix hit ratio", result.ratio, "", AIM)
        rows.append(aimed if result.copied_bytes else BenchRow(aimed.name, result.ratio, ""))
        rows.append(at_most(f"{name}: off the lab, at the same times", abs(result.ratio - lab), "", OFF_LAB_AIM))
        rows.append(BenchRow(f"{name}: hits on the reader's own node", result.local, "share"))
        rows.append(BenchRow(f"{name}: hits in DRAM", result.dram_hits, "blocks"))
        rows.append(BenchRow(f"{name}: bytes copied to home nodes a hit", result.copied_bytes / max(1, result.hits), "bytes"))
        rows.append(BenchRow(f"{name}: requests late by at most", result.late_s, "s"))
        print(name, dataclasses.replace(result, as_sent=()), "lab", lab, file=sys.stderr, flush=True)

    chosen = os.environ.get("POOL_PARTS", "one node,one writer,80/10/5/5,25 each,routed,one node tiered,tiered").split(",")
    if "one node" in chosen:
        one = replay(requests, nodes=1, dram_blocks=NODES * NODE_BLOCKS, shares=[1], pace=pace)
        row("one node of 10,000 blocks", one, CacheReplay(POLICY, NODES * NODE_BLOCKS).run(one.as_sent).prefix_hit_ratio)
    for name, shares, is_routed in (
        ("one writer", (1, 0, 0, 0), False),
        ("80/10/5/5", (80, 10, 5, 5), False),
        ("25 each", (1, 1, 1, 1), False),
        ("routed", (1, 1, 1, 1), True),
    ):
        if name in chosen:
            four = replay(requests, nodes=NODES, dram_blocks=NODE_BLOCKS, shares=shares, pace=pace, is_routed=is_routed)
            lab = HomePool(POLICY, NODE_BLOCKS, HomePoolOptions(shares, is_routed=is_routed, lag_s=COPY_S)).run(four.as_sent)
            row(f"4 x {NODE_BLOCKS:,} blocks, {name}", four, lab.prefix_hit_ratio)
    rows += tiered_rows(requests, chosen, pace, row)
    Console().print(table(rows))
    write(rows, OUT)
    return 0


def tiered_rows(
    requests: Sequence[TraceRequest], chosen: Sequence[str], pace: float, row: Callable[[str, Result, float], None]
) -> list[BenchRow]:
    """Replay one node and four nodes with DRAM and NVMe, and pass the results to `row`. Returns their comparison."""
    dram, nvme, ratios = NODES * DRAM_BLOCKS, NODES * NODE_BLOCKS, list[float]()
    if "one node tiered" in chosen:
        one = replay(requests, nodes=1, dram_blocks=dram, nvme_blocks=nvme, shares=[1], pace=pace)
        lab = TwoTiers(POLICY, dram_blocks=dram, nvme_blocks=nvme).run(one.as_sent)
        row(f"one node of {dram:,} blocks of DRAM, {nvme:,} of NVMe", one, lab.prefix_hit_ratio)
        ratios.append(one.ratio)
    if "tiered" in chosen:
        four = replay(requests, nodes=NODES, dram_blocks=DRAM_BLOCKS, nvme_blocks=NODE_BLOCKS, shares=[1] * NODES, pace=pace)
        pool = HomePool(POLICY, DRAM_BLOCKS, HomePoolOptions([1] * NODES, lag_s=COPY_S), nvme_blocks=NODE_BLOCKS)
        row(f"4 x {DRAM_BLOCKS:,} blocks of DRAM, {NODE_BLOCKS:,} of NVMe, 25 each", four, pool.run(four.as_sent).prefix_hit_ratio)
        ratios.append(four.ratio)
    if len(ratios) < 2:
        return []
    return [at_least("four nodes with two tiers / one", ratios[1] / ratios[0], "ratio", TIERED_SHARE_AIM)]


if __name__ == "__main__":
    sys.exit(main())
