"""What a replay found: its own counts, and how the cluster changed meanwhile. As JSON or as a table."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.client.control import Control
from kvstore.client.tools.replay import ReplayCounts
from kvstore.client.tools.status_tables import duration, percent, rate, tiers_table
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.node_states import AWAY
from kvstore.protocol.settings import format_size

SETTLE_DEADLINE_S: Final = 10.0
POLL_INTERVAL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """`before` and `after` are the cluster's status at both ends; evictions are counted between them."""

    counts: ReplayCounts
    hits_by_tier: Mapping[str, int]
    before: pb.StatusReply
    after: pb.StatusReply
    block_bytes: int
    seconds: float

    @property
    def evictions_by_tier(self) -> dict[str, int]:
        """Blocks that left the cluster during the replay, by the tier they left last."""
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
    """The status once every live node has sent a heartbeat after this call began, and moves no block between its tiers; or as it is after
    SETTLE_DEADLINE_S."""
    begin = clock()
    while True:
        found = control.status()
        waited = clock() - begin
        live = [node for node in found.nodes if node.state not in AWAY]
        if waited > SETTLE_DEADLINE_S or all(node.heartbeat_age_s < waited and not node.counters["moving"] for node in live):
            return found
        sleep(POLL_INTERVAL_S)


def _by_tier(status: pb.StatusReply, field: str) -> dict[str, int]:
    """A field of the tiers, summed over the nodes."""
    sums: dict[str, int] = {}
    for node in status.nodes:
        for tier in node.tiers:
            sums[tier.name] = sums.get(tier.name, 0) + getattr(tier, field)
    return sums
