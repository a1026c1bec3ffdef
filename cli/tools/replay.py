"""Replay of a trace against a store, as an engine would: read the blocks of each prompt, compare every byte, store the missing blocks.

A block's bytes derive from its id, so they can be checked without keeping them. The first wrong byte ends the replay.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.cli.tools.cluster import LocalCluster
from kvstore.cli.tools.status_tables import tiers_table
from kvstore.cli.tools.tables import duration, percent, progress, rate
from kvstore.client.block_bytes import BlockArena, block_key
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.client.sync import Client
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Retry
from kvstore.protocol.node_states import NOT_RUNNING
from kvstore.protocol.settings import format_size

NAMESPACE: Final = "replay"
ARENA_BYTES: Final = 64 << 20
"""Bytes of one batch, allocated twice: bytes read and bytes expected. A longer prompt is read in several batches."""
MAX_BATCH_BLOCKS: Final = 1024

SETTLE_DEADLINE_S: Final = 10.0
POLL_INTERVAL_S: Final = 0.1

DEATH_NOTICE_S: Final = 1.0
"""A dying process closes its connections shortly before its exit is visible."""


class ReplayStore(Protocol):
    """The part of Client that a replay uses."""

    def get_batch_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int | None]: ...

    def put_batch(
        self, keys: Sequence[bytes], values: Sequence[memoryview], *, namespace: str, parents: Sequence[bytes | None]
    ) -> list[bool]: ...


@dataclass(slots=True)
class ReplayCounts:
    """Counters of a replay so far. Seconds are those spent in calls of the store."""

    requests: int = 0
    blocks: int = 0
    prefix_hits: int = 0
    """Blocks before a request's first miss."""
    hits: int = 0
    stored: int = 0
    """Misses that this replay stored; others were stored by another client meanwhile, or are repeated in one prompt."""
    wrong_bytes: int = 0
    wrong_block: str = ""
    """The block that ended the replay, "" if none did."""
    get_bytes: int = 0
    get_s: float = 0.0
    put_bytes: int = 0
    put_s: float = 0.0

    @property
    def prefix_hit_ratio(self) -> float:
        return self.prefix_hits / self.blocks if self.blocks else 0.0

    @property
    def get_bytes_per_s(self) -> float:
        return self.get_bytes / self.get_s if self.get_s else 0.0

    @property
    def put_bytes_per_s(self) -> float:
        return self.put_bytes / self.put_s if self.put_s else 0.0


class StoreReplay:
    """Replays requests one after the other against one store. `counts` may be read at any time."""

    def __init__(self, store: ReplayStore, *, block_bytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Raises InvalidArgument for a block size below 1."""
        self._store = store
        self._clock = clock
        blocks = min(MAX_BATCH_BLOCKS, max(1, ARENA_BYTES // max(1, block_bytes)))
        self._read = BlockArena(blocks, block_bytes)
        self._expected = BlockArena(blocks, block_bytes)
        self.counts = ReplayCounts()

    def run(self, requests: Iterable[TraceRequest], on_request: Callable[[], None] = lambda: None) -> ReplayCounts:
        """Replay until the end, or until bytes are wrong (`counts.wrong_bytes`). Raises errors of the store and of `requests`."""
        for request in requests:
            self.request(request.hash_ids)
            on_request()
            if self.counts.wrong_bytes:
                break
        return self.counts

    def request(self, ids: Sequence[int]) -> None:
        """Replay one prompt."""
        keys = [block_key(block, self._read.block_bytes) for block in ids]
        self.counts.requests += 1
        self.counts.blocks += len(ids)
        found: list[bool] = []
        for start in range(0, len(ids), len(self._read)):
            found += self._get(ids[start : start + len(self._read)], keys[start : start + len(self._read)], start)
            if self.counts.wrong_bytes:
                return
        misses = [index for index, hit in enumerate(found) if not hit]
        self.counts.hits += len(found) - len(misses)
        self.counts.prefix_hits += misses[0] if misses else len(found)
        for start in range(0, len(misses), len(self._expected)):
            self._put(ids, keys, misses[start : start + len(self._expected)])

    def _get(self, ids: Sequence[int], keys: Sequence[bytes], first: int) -> list[bool]:
        begin = self._clock()
        sizes = self._store.get_batch_into(keys, self._read.views[: len(keys)])
        self.counts.get_s += self._clock() - begin
        self.counts.get_bytes += sum(size for size in sizes if size is not None)
        if any(size is not None for size in sizes):
            self._check(ids, sizes, first)
        return [size is not None for size in sizes]

    def _check(self, ids: Sequence[int], sizes: Sequence[int | None], first: int) -> None:
        """Compare the blocks that were read with the bytes that their ids imply."""
        block_bytes = self._read.block_bytes
        self._expected.make(ids)
        wrong = self._read.wrong_bytes(self._expected, len(ids))
        for index, size in enumerate(sizes):
            if size is None:
                continue
            count = int(wrong[index]) if size == block_bytes else max(size, block_bytes)
            if count and not self.counts.wrong_bytes:
                self.counts.wrong_bytes = count
                self.counts.wrong_block = f"block {ids[index]} (number {first + index} of request {self.counts.requests})"

    def _put(self, ids: Sequence[int], keys: Sequence[bytes], misses: Sequence[int]) -> None:
        self._expected.make([ids[index] for index in misses])
        parents = [keys[index - 1] if index else None for index in misses]
        begin = self._clock()
        stored = self._store.put_batch(
            [keys[index] for index in misses], self._expected.views[: len(misses)], namespace=NAMESPACE, parents=parents
        )
        self.counts.put_s += self._clock() - begin
        self.counts.stored += sum(stored)
        self.counts.put_bytes += sum(stored) * self._read.block_bytes


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Result of a replay. `before` and `after` are the cluster's status; evictions are counted between them."""

    counts: ReplayCounts
    hits_by_tier: Mapping[str, int]
    before: pb.StatusReply
    after: pb.StatusReply
    block_bytes: int
    seconds: float

    @property
    def evictions_by_tier(self) -> dict[str, int]:
        """Tier -> blocks that were evicted from the cluster during the replay."""
        evicted = _by_tier(self.after, "evictions")
        earlier = _by_tier(self.before, "evictions")
        return {name: count - earlier.get(name, 0) for name, count in evicted.items()}

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        counts = self.counts
        return {
            "requests": counts.requests,
            "blocks": counts.blocks,
            "block_bytes": self.block_bytes,
            "prefix_hit_ratio": counts.prefix_hit_ratio,
            "hits": counts.hits,
            "stored": counts.stored,
            "wrong_bytes": counts.wrong_bytes,
            "hits_by_tier": dict(self.hits_by_tier),
            "put_bytes_per_s": counts.put_bytes_per_s,
            "get_bytes_per_s": counts.get_bytes_per_s,
            "evictions": sum(self.evictions_by_tier.values()),
            "evictions_by_tier": self.evictions_by_tier,
            "occupancy": self._occupancy(),
            "seconds": self.seconds,
        }

    def as_table(self) -> RenderableType:
        """For people."""
        counts = self.counts
        right = Text("0 wrong bytes", style="green") if not counts.wrong_bytes else Text(f"{counts.wrong_bytes} wrong bytes", style="red")
        hits = ", ".join(f"{count:,} from {name}" for name, count in self.hits_by_tier.items() if count)
        table = Table.grid(padding=(0, 2))
        table.add_row("replayed", f"{counts.requests:,} requests, {counts.blocks:,} blocks of {format_size(self.block_bytes)}")
        table.add_row("in", duration(self.seconds))
        table.add_row("prefix hit ratio", f"{counts.prefix_hit_ratio:.4f}")
        table.add_row("hits", f"{counts.hits:,} ({percent(counts.hits, counts.blocks)})" + (f": {hits}" if hits else ""))
        table.add_row("checked", right)
        table.add_row("read at", rate(counts.get_bytes_per_s))
        table.add_row("stored at", rate(counts.put_bytes_per_s))
        table.add_row("evicted", f"{sum(self.evictions_by_tier.values()):,} blocks")
        return Group(table, Text(), tiers_table(self.after))

    def _occupancy(self) -> dict[str, dict[str, float]]:
        capacity, used, blocks = (_by_tier(self.after, name) for name in ("capacity_bytes", "used_bytes", "blocks"))
        return {
            name: {
                "used_bytes": used[name],
                "capacity_bytes": capacity[name],
                "blocks": blocks[name],
                "share": used[name] / capacity[name] if capacity[name] else 0.0,
            }
            for name in capacity
        }


def settled_status(
    control: Control, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> pb.StatusReply:
    """Wait until every live node has sent a heartbeat and moves no block between its tiers, and return the status.

    After SETTLE_DEADLINE_S the current status is returned.
    """
    begin = clock()
    while True:
        found = control.status()
        waited = clock() - begin
        live = [node for node in found.nodes if node.state not in NOT_RUNNING]
        if waited > SETTLE_DEADLINE_S or all(node.heartbeat_age_s < waited and not node.counters["moving"] for node in live):
            return found
        sleep(POLL_INTERVAL_S)


def _by_tier(status: pb.StatusReply, field: str) -> dict[str, int]:
    """Tier -> sum of a field over the nodes."""
    sums: dict[str, int] = {}
    for node in status.nodes:
        for tier in node.tiers:
            sums[tier.name] = sums.get(tier.name, 0) + getattr(tier, field)
    return sums


def run_replay(
    settings: ClientSettings, requests: Iterable[TraceRequest], *, total: int, block_bytes: int, cluster: LocalCluster | None = None
) -> ReplayReport:
    """Replay with a progress bar on standard error. If a daemon of `cluster` exits, its failure is raised instead of the client's."""
    control = Control.find(settings) if cluster is None else cluster.control()
    with control, Client(settings=settings) as client:
        before = control.status()
        engine = StoreReplay(client, block_bytes=block_bytes)
        begin = time.perf_counter()
        try:
            with progress("replaying", total) as on_request:
                counts = engine.run(requests, on_request)
        except Retry:
            if cluster is not None:
                cluster.check(wait_s=DEATH_NOTICE_S)
            raise
        seconds = time.perf_counter() - begin
        after = settled_status(control)
        return ReplayReport(counts, client.stats().hits_by_tier, before, after, block_bytes, seconds)
