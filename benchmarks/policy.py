"""`make bench-policy`: every eviction policy on the public conversation trace and on generated conversations; two tiers, four nodes as one
pool, and hints; the cost of operations; new blocks until their first read; the live store against the lab. One run, one machine. Rows go
to benchmarks/out/policy.json.

Without the trace its part is left out. The live store replays the first LIVE_REQUESTS prompts only, to end within minutes, one after the
other: one node, values of 4 KiB, DRAM for LIVE_BLOCKS of them, every byte checked. The lab it is compared with gets the prompts at the
times at which the live store got them: a policy that looks at the clock decides otherwise in a minute than in the trace's hour.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.harness import write
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow, at_least, at_most, table
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.cli.tools.replay import StoreReplay as LiveReplay
from kvstore.client import Client
from kvstore.kvcache.traces.mooncake import TraceRequest, read_trace
from kvstore.kvcache.traces.named import generate
from kvstore.lab.accesses import flatten, infinite_hits
from kvstore.lab.home_pool import HomePoolOptions
from kvstore.lab.jobs import HintJob, HintRow, HomePoolJob, HomePoolRow, Job, PolicyJob, PolicyRow, TierJob, TierRow
from kvstore.lab.pools import Routing, compare
from kvstore.lab.replay import CacheReplay
from kvstore.lab.report import bounds, hint_table, policy_table
from kvstore.lab.runs import run_jobs, spread
from kvstore.tiers.policies.by_name import POLICIES, make_policy
from kvstore.tiers.policies.interface import EvictionPolicy
from kvstore.tiers.policies.prefix.policy import PrefixPolicy

OUT: Final = Path(__file__).parent / "out" / "policy.json"
TRACE: Final = Path(__file__).parents[2] / "shared/data/traces/conversation_trace.jsonl"
CAPACITIES: Final = (1000, 3000, 10_000, 30_000, 50_000)
OURS: Final = PrefixPolicy.name
FLOORS: Final = (0.0663, 0.1291, 0.2353, 0.3383, 0.3547)
"""Least prefix hit ratios of our policy on the trace, by capacity: those before new blocks were protected, less .0005."""
HINT_SHARE: Final = 0.5
HINT_CAPACITIES: Final = (1000, 10_000, 50_000)
HINT_AIM_BLOCKS: Final = 10_000
UNSEEN_SEEDS: Final = (2026, 2027)
REQUESTS: Final = 12_031
"""As many as the trace has."""
COST_BLOCKS: Final = 50_000
LIVE_BLOCKS: Final = 3000
LIVE_REQUESTS: Final = 4000
LIVE_BYTES: Final = 4096
FRESH_BLOCKS: Final = 1024
FRESH_BATCH: Final = 64
FRESH_BYTES: Final = 65_536
FRESH_PACES_S: Final = (0.001, 0.01, 0.05, 0.2, 1.0, 10.0)
"""Seconds between batches that are not read."""
LIVE_PACE_S: Final = 0.05
HANDOVER_BLOCKS: Final = 40
"""Of a prompt that one engine stores and another reads HANDOVER_S later; ten prompts a second."""
HANDOVER_S: Final = 1.0
POOL_INSTANCES: Final = 4
POOL_BLOCKS: Final = 5859
"""3M tokens in blocks of 512: the local cache of an instance in the paper."""
TIER_AIMS: Final = {(1000, 10_000): (0.240, 16_771), (3000, 30_000): (0.338, 32_893)}
"""By blocks of DRAM and NVMe: least prefix hit ratio, and hits in DRAM."""
HOME_POOL_BLOCKS: Final = 2500
"""Of each of four nodes."""
HOME_POOL_AIM: Final = 0.225
LOCAL_AIM: Final = 0.6


def main() -> int:
    console = Console()
    rows: list[BenchRow] = []
    trace = list(read_trace(TRACE)) if TRACE.exists() else []
    unseen = {f"generated {seed}": list(itertools.islice(generate(seed=seed), REQUESTS)) for seed in UNSEEN_SEEDS}
    for name, requests in {**({"conversation": trace} if trace else {}), **unseen}.items():
        console.print(f"\n[bold]{name}[/bold]")
        rows += ratio_rows(name, requests, console)
    if trace:
        rows += [*reference_rows(trace, rows), *floor_rows(rows), *tier_rows(trace), *home_pool_rows(trace), *hint_rows(trace, console)]
    first = trace or unseen[f"generated {UNSEEN_SEEDS[0]}"]
    for part in (cost_rows(first), fresh_rows(), live_rows(first[:LIVE_REQUESTS])):
        for row in part:
            print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
            rows.append(row)
    console.print(table([row for row in rows if row.aim]))
    write(rows, OUT)
    return 0


def ratio_name(name: str, policy: str, blocks: int) -> str:
    return f"{name}: {policy} at {blocks:,} blocks"


def ratio_rows(name: str, requests: Sequence[TraceRequest], console: Console) -> list[BenchRow]:
    """Every policy at every capacity, and ours against the best other one."""
    jobs: list[Job] = [PolicyJob(policy, blocks) for policy in sorted(POLICIES) for blocks in CAPACITIES]
    begin = time.perf_counter()
    found = [row for row in run_jobs(jobs, requests) if isinstance(row, PolicyRow)]
    seconds = time.perf_counter() - begin
    console.print(policy_table(found, bounds(flatten(requests), CAPACITIES)))
    ratios = {(row.policy, row.capacity_blocks): row.prefix_hit_ratio for row in found}
    rows = [BenchRow(ratio_name(name, policy, blocks), ratio, "prefix hit ratio") for (policy, blocks), ratio in ratios.items()]
    for blocks in CAPACITIES:
        best = max(ratio for (policy, size), ratio in ratios.items() if size == blocks and policy != OURS)
        rows.append(at_least(f"{name}: {OURS} / best other at {blocks:,}", ratios[OURS, blocks] / best, "ratio", 1))
    rows.append(at_least(f"{name}: {OURS} / lru at 10,000", ratios[OURS, 10_000] / ratios["lru", 10_000], "ratio", 1.1))
    rows.append(at_most(f"{name}: {len(jobs)} replays", seconds, "s", 120))
    return rows


def reference_rows(trace: Sequence[TraceRequest], rows: Sequence[BenchRow]) -> Iterator[BenchRow]:
    """Rows of published figures of the trace."""
    by_name = {row.name: row.value for row in rows}
    yield near("LRU at 10,000, as published", by_name[ratio_name("conversation", "lru", 10_000)], "prefix hit ratio", 0.2112, 0.0005)
    accesses = flatten(trace)
    yield near("infinite cache, as published", infinite_hits(accesses) / len(accesses), "prefix hit ratio", 0.3664, 0.0005)
    for routing in Routing:
        found = compare(trace, policy="lru", instances=POOL_INSTANCES, blocks_per_instance=POOL_BLOCKS, routing=routing)
        name = f"pool / {POOL_INSTANCES} caches of 3M tokens, {routing.value}"
        # Published: 1.4 to 2.4 over three traces, 2.22 for this one.
        gain = found.gain or 0.0
        is_blind = routing is not Routing.CACHE_AWARE
        yield BenchRow(name, gain, "ratio", "1.4 to 2.4", 1.4 <= gain <= 2.4) if is_blind else BenchRow(name, gain, "ratio")


def tier_rows(trace: Sequence[TraceRequest]) -> Iterator[BenchRow]:
    """Rows of a node with DRAM and NVMe."""
    found = [row for row in run_jobs([TierJob(OURS, dram, nvme) for dram, nvme in TIER_AIMS], trace) if isinstance(row, TierRow)]
    for row, (ratio, dram_hits) in zip(found, TIER_AIMS.values(), strict=True):
        label = f"{row.dram_blocks:,} blocks of DRAM, {row.nvme_blocks:,} of NVMe"
        yield at_least(f"{label}: {OURS}", row.prefix_hit_ratio, "prefix hit ratio", ratio)
        yield at_least(f"{label}: hits in DRAM", row.dram_hits, "blocks", dram_hits)
        yield BenchRow(f"{label}: written to NVMe a hit", row.demotions / (row.dram_hits + row.nvme_hits), "blocks")


def home_pool_rows(trace: Sequence[TraceRequest]) -> Iterator[BenchRow]:
    """Rows of four nodes whose memory is one pool by home copies."""
    cases = [("one writer", (1.0, 0.0, 0.0, 0.0), False), ("80/10/5/5", (80.0, 10.0, 5.0, 5.0), False)]
    cases += [("25 each", (1.0,) * 4, False), ("routed", (1.0,) * 4, True)]
    jobs: list[Job] = [
        HomePoolJob(OURS, HOME_POOL_BLOCKS, 0, HomePoolOptions(shares, is_routed=is_routed, is_shared=True))
        for _, shares, is_routed in cases
    ]
    jobs.append(HomePoolJob(OURS, HOME_POOL_BLOCKS, 0, HomePoolOptions(cases[0][1], is_routed=False, is_shared=False)))
    *found, separate = [row for row in run_jobs(jobs, trace) if isinstance(row, HomePoolRow)]
    separate_name = f"4 x {HOME_POOL_BLOCKS:,} blocks, {cases[0][0]}: separate statistics"
    yield BenchRow(separate_name, separate.prefix_hit_ratio, "prefix hit ratio")
    for (name, _, is_routed), shared in zip(cases, found, strict=True):
        label = f"4 x {HOME_POOL_BLOCKS:,} blocks, {name}"
        yield at_least(f"{label}: shared statistics", shared.prefix_hit_ratio, "prefix hit ratio", HOME_POOL_AIM)
        local = f"{label}: hits on the reader's own node"
        yield at_least(local, shared.local_share, "share", LOCAL_AIM) if is_routed else BenchRow(local, shared.local_share, "share")
        yield BenchRow(f"{label}: copies a hit", shared.copies_per_hit, "blocks")


def floor_rows(rows: Sequence[BenchRow]) -> Iterator[BenchRow]:
    """Rows of our policy's hit ratios on the trace against FLOORS."""
    by_name = {row.name: row.value for row in rows}
    for blocks, floor in zip(CAPACITIES, FLOORS, strict=True):
        yield at_least(
            f"{OURS} at {blocks:,} blocks, new ones protected", by_name[ratio_name("conversation", OURS, blocks)], "prefix hit ratio", floor
        )


def hint_rows(trace: Sequence[TraceRequest], console: Console) -> Iterator[BenchRow]:
    """What hints from half of the sessions gain, and what random ones cost."""
    found = [row for row in run_jobs([HintJob(OURS, blocks, HINT_SHARE) for blocks in HINT_CAPACITIES], trace) if isinstance(row, HintRow)]
    console.print(hint_table(found))
    for row in found:
        at = f"{row.capacity_blocks:,} blocks"
        yield BenchRow(f"hints of half of the sessions at {at}", row.true_hints, "prefix hit ratio")
        yield BenchRow(f"hints, half of them random, at {at}", row.half_true, "prefix hit ratio")
        yield at_most(f"random hints cost at {at}", row.unhinted - row.random_hints, "prefix hit ratio", 0.001)
        if row.capacity_blocks == HINT_AIM_BLOCKS:
            yield at_least(f"hints: part of the way to Belady at {at}", row.gain or 0.0, "ratio", 0.5)


def near(name: str, value: float, unit: str, aim: float, tolerance: float) -> BenchRow:
    return BenchRow(name, value, unit, f"{aim:g} +- {tolerance:g}", abs(value - aim) <= tolerance)


# --- what an operation costs ---


@dataclass(slots=True)
class Cost:
    """Seconds and number of one kind of operation."""

    seconds: float = 0.0
    count: int = 0

    @property
    def us(self) -> float:
        return self.seconds / self.count * 1e6 if self.count else 0.0


def cost_rows(requests: Sequence[TraceRequest]) -> Iterator[BenchRow]:
    for policy in sorted(POLICIES):
        touch, evict, insert = costs(policy, requests)
        yield at_most(f"{policy}: touch, {COST_BLOCKS:,} blocks", touch.us, "us", 5)
        yield at_most(f"{policy}: eviction, {COST_BLOCKS:,} blocks", evict.us, "us", 5)
        yield BenchRow(f"{policy}: insertion, {COST_BLOCKS:,} blocks", insert.us, "us")


def costs(name: str, requests: Sequence[TraceRequest]) -> tuple[Cost, Cost, Cost]:
    """Of touches, evictions (a victim found and removed) and insertions, in the order of the lab's replay.

    Prompts are timed whole, by the processor time of this thread.
    """
    now_s = 0.0
    policy = make_policy(name, clock=lambda: now_s)
    resident: set[int] = set()
    touch, evict, insert = Cost(), Cost(), Cost()
    for request in requests:
        now_s = request.timestamp_ms / 1000
        present = [block for block in request.hash_ids if block in resident]
        parents = dict(zip(request.hash_ids, (None, *request.hash_ids), strict=False))
        missing = [(block, parent) for block, parent in parents.items() if block not in resident]
        surplus = range(len(resident) + len(missing) - COST_BLOCKS)
        begin = time.thread_time()
        for block in present:
            policy.touch(block)
        touched = time.thread_time()
        victims = []
        for _ in surplus:
            victim = policy.victim()
            policy.remove(victim)
            victims.append(victim)
        evicted = time.thread_time()
        for block, parent in missing:
            policy.insert(block, parent)
        inserted = time.thread_time()
        resident.difference_update(victims)
        resident.update(block for block, _ in missing)
        for cost, seconds, count in (
            (touch, touched - begin, len(present)),
            (evict, evicted - touched, len(victims)),
            (insert, inserted - evicted, len(missing)),
        ):
            cost.seconds += seconds
            cost.count += count
    return touch, evict, insert


# --- new blocks ---


def fresh_rows() -> Iterator[BenchRow]:
    """Whether new blocks stay: where nothing is read, in the policy and in a live node; and where each prompt is read once."""
    for pace_s in FRESH_PACES_S:
        present = newest_present(pace_s)
        yield at_least(f"unread batches, {pace_s:g} s apart: of the newest half, present", present, "share", 0.98)
    yield at_least("live store: of the newest half, present", newest_present_live(), "share", 0.98)
    yield at_least(f"prompts read {HANDOVER_S:g} s after they were stored: blocks found", handed_over(), "share", 1)


def unread_batches() -> list[list[bytes]]:
    """Keys for two and a half times FRESH_BLOCKS."""
    return [[b"%d-%d" % (number, at) for at in range(FRESH_BATCH)] for number in range(FRESH_BLOCKS * 5 // 2 // FRESH_BATCH)]


def store_batch(policy: EvictionPolicy[bytes], keys: Sequence[bytes], parents: Sequence[bytes | None] | None = None) -> None:
    """Store a batch in a tier of FRESH_BLOCKS as the block table does: all victims first."""
    policy.take_victims(len(policy) + len(keys) - FRESH_BLOCKS, lambda key: True, lambda key: True)
    policy.insert_all(keys, parents)


def newest_present(pace_s: float) -> float:
    """Share of the newest FRESH_BLOCKS / 2 blocks that are present after unread batches."""
    now_s = 0.0
    policy: EvictionPolicy[bytes] = PrefixPolicy(clock=lambda: now_s)
    batches = unread_batches()
    for keys in batches:
        store_batch(policy, keys)
        now_s += pace_s
    newest = list(itertools.chain.from_iterable(batches))[-FRESH_BLOCKS // 2 :]
    return sum(key in policy for key in newest) / len(newest)


def newest_present_live() -> float:
    """As `newest_present`, in a live node."""
    value, batches = bytes(FRESH_BYTES), unread_batches()
    plan = ClusterPlan(is_private=True, dram=str(FRESH_BLOCKS * FRESH_BYTES), policy=OURS)
    with LocalCluster(plan, on_log=show_warning) as running:
        running.wait_warm()
        with Client(running.address) as client:
            for keys in batches:
                client.put_batch(keys, [value] * len(keys), ack="cluster")
                time.sleep(LIVE_PACE_S)
            newest = list(itertools.chain.from_iterable(batches))[-FRESH_BLOCKS // 2 :]
            return sum(client.exists_batch(newest)) / len(newest)


def handed_over() -> float:
    """Share of the blocks that are present when another engine reads their prompt."""
    now_s, found, asked = 0.0, 0, 0
    policy: EvictionPolicy[bytes] = PrefixPolicy(clock=lambda: now_s)
    prompts = [[b"%d-%d" % (number, at) for at in range(HANDOVER_BLOCKS)] for number in range(400)]
    behind = round(HANDOVER_S * 10)
    for number, keys in enumerate(prompts):
        now_s = number / 10
        store_batch(policy, keys, [None, *keys[:-1]])
        for key in prompts[number - behind] if number >= behind else ():
            asked += 1
            found += key in policy
            policy.touch(key)
    return found / asked


# --- the live store ---


def live_rows(requests: Sequence[TraceRequest]) -> Iterator[BenchRow]:
    """Hit rate of a real node, and its distance from the simulated one."""
    for policy in sorted(POLICIES):
        live, as_sent = live_ratio(policy, requests)
        lab = CacheReplay(policy, LIVE_BLOCKS).run(spread(as_sent)).prefix_hit_ratio
        yield BenchRow(f"live store: {policy} at {LIVE_BLOCKS:,} blocks, {len(requests):,} requests", live, "prefix hit ratio")
        yield at_most(f"live store: {policy}, off the lab", abs(live - lab), "prefix hit ratio", 0.005)


def live_ratio(policy: str, requests: Sequence[TraceRequest]) -> tuple[float, list[TraceRequest]]:
    """The prefix hit ratio, and the requests at the times at which they were sent."""
    plan = ClusterPlan(is_private=True, dram=str(LIVE_BLOCKS * LIVE_BYTES), policy=policy)
    as_sent = []
    with LocalCluster(plan, on_log=show_warning) as running:
        running.wait_warm()
        with Client(running.address) as client:
            live = LiveReplay(client, block_bytes=LIVE_BYTES)
            for request in requests:
                as_sent.append(dataclasses.replace(request, timestamp_ms=time.monotonic() * 1000))
                live.request(request.hash_ids)
    assert not live.counts.wrong_bytes, live.counts.wrong_block
    return live.counts.prefix_hit_ratio, as_sent


if __name__ == "__main__":
    sys.exit(main())
