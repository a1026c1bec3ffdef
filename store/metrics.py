"""What a node measures, and what of it its metrics tell. The node's loop is the only caller."""

import heapq
import logging
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.protocol import control_pb2 as pb
from kvstore.security.quotas.quota import SLABS
from kvstore.store.block_table.access_counts import MAX_TENANTS, AccessClock, TierCounts
from kvstore.store.block_table.block import DRAM, TIERS
from kvstore.store.block_table.table import BlockTable
from kvstore.telemetry.logs import named
from kvstore.telemetry.metrics.histogram import AGE_BOUNDS_S, Histogram
from kvstore.telemetry.metrics.metric import NODE, Reading, Readings
from kvstore.telemetry.metrics.requests import RequestMetrics
from kvstore.transfer.engine import TransferEngine

EVICTIONS_LOG_NS: Final = 60_000_000_000
"""Between two lines of the log about evictions from one tier."""
log = logging.getLogger("kvstore.store")

COUNTERS: Final = {
    "written_bytes": "in_bytes",
    "read_bytes": "out_bytes",
    "table_limit_bytes": "max_table_bytes",
    "waiting_requests": "waiting",
    "uncommitted_blocks": "undecided",
    "moving_blocks": "moving",
    "publish_backlog_events": "publish_backlog",
    "engine_served_bytes": "engine_bytes",
}
"""The counters of the status behind metrics that have other names, less `kvstore_node_`."""


class _LoggedEvictions(NamedTuple):
    """When the log was told of a tier's evictions last, and how many there had been."""

    at_ns: int
    evictions: int
    table_evictions: int
    quota_evictions: int


class NodeMetrics:
    """See the module. `requests` is the server's observer."""

    def __init__(self) -> None:
        self.requests = RequestMetrics()
        self._clock = AccessClock()
        self._ages: dict[int, Histogram] = {}
        self._told: dict[int, _LoggedEvictions] = {}

    def tick(self, table: BlockTable, now_ns: int) -> None:
        """Ten times a second: what was evicted since has its age now."""
        self._clock.sample(table.accesses, now_ns)
        for index, _, counts, _ in table.levels():
            counts.tidy()
            if not counts.evicted:
                continue
            evicted, counts.evicted = counts.evicted, []
            ages = self._ages.setdefault(index, Histogram(AGE_BOUNDS_S))
            for access in evicted:
                ages.record(self._clock.age_ns(access, now_ns))
            if log.isEnabledFor(logging.INFO) and self._is_due(index, now_ns):
                # Sorted for a line of the log only: a full node evicts thousands of blocks a tick.
                self._tell(index, counts, self._clock.age_ns(sorted(evicted)[len(evicted) // 2], now_ns), now_ns)

    def _is_due(self, index: int, now_ns: int) -> bool:
        """Whether the log is to be told of the tier's evictions again."""
        told = self._told.get(index)
        return told is None or now_ns - told.at_ns >= EVICTIONS_LOG_NS

    def _tell(self, index: int, counts: TierCounts, median_age_ns: int, now_ns: int) -> None:
        """A line in the log, with the age of those that left just now."""
        before = self._told.get(index, _LoggedEvictions(0, 0, 0, 0))
        blocks = counts.evictions - before.evictions
        for_table = counts.table_evictions - before.table_evictions
        for_quota = counts.quota_evictions - before.quota_evictions
        self._told[index] = _LoggedEvictions(now_ns, counts.evictions, counts.table_evictions, counts.quota_evictions)
        tier, age_s = TIERS[index], round(median_age_ns / 1e9, 1)
        text = "%d blocks have left the node from %s since it was last told of, %d of them for want of room in the table, %d for a quota"
        event = named("blocks_evicted", tier=tier, blocks=blocks, for_table=for_table, for_quota=for_quota, median_age_s=age_s)
        log.info(text, blocks, tier, for_table, for_quota, extra=event)

    def read(
        self,
        table: BlockTable,
        tiers: Sequence[pb.TierStatus],
        counters: Mapping[str, int],
        engine: TransferEngine | None,
        own: Mapping[str, Reading],
    ) -> Readings:
        """All metrics of the catalog's NODE, with `own` those that the node itself measures."""
        names = {metric.name: metric.name.removeprefix("kvstore_node_") for metric in NODE if not metric.labels}
        told: dict[str, Reading] = {
            name: counters[counter] for name, short in names.items() if (counter := COUNTERS.get(short, short)) in counters
        }
        told |= own
        told["kvstore_node_request_duration_seconds"] = self.requests.durations()
        told["kvstore_node_requests_refused"] = self.requests.refusals()
        for field in ("capacity_bytes", "used_bytes", "quarantined_bytes", "blocks", "demotions", "promotions"):
            told[f"kvstore_node_tier_{field}"] = {(tier.name,): getattr(tier, field) for tier in tiers}
        told["kvstore_node_tier_healthy"] = {(tier.name,): int(tier.health == "ok") for tier in tiers}
        told["kvstore_node_tier_held_bytes"] = {(TIERS[index],): table.holds.held_bytes(index) for index, *_ in table.levels()}
        told["kvstore_node_tier_device_written_bytes"] = {(TIERS[index],): tier.written_bytes for index, tier, _, _ in table.levels()}
        levels = [(TIERS[index], counts) for index, _, counts, _ in table.levels()]
        told["kvstore_node_tier_hits"] = {(tier, tenant): count for tier, counts in levels for tenant, count in counts.tenant_hits.items()}
        told["kvstore_node_tier_evictions"] = {
            (tier, reason): count
            for tier, counts in levels
            for reason, count in (
                ("room", counts.evictions - counts.table_evictions - counts.quota_evictions),
                ("table", counts.table_evictions),
                ("quota", counts.quota_evictions),
            )
        }
        told |= _of_tenants(table)
        told["kvstore_node_eviction_age_seconds"] = {(TIERS[index],): ages.counts() for index, ages in self._ages.items()}
        rails = engine.rails() if engine is not None else {}
        for field in ("delivered_bytes", "failed_slices", "rests"):
            told[f"kvstore_node_rail_{field}"] = {name: getattr(count, field) for name, count in rails.items()}
        return told


def _of_tenants(table: BlockTable) -> dict[str, Reading]:
    """What the tenants take that take most of DRAM, and what they may."""
    use, quotas = table.quotas.use(), table.quotas.now
    names = heapq.nlargest(MAX_TENANTS, use, key=lambda name: use[name].tiers[DRAM])
    limits = {(tier, name): quotas.of(name).of_tier(index) for index, tier in enumerate(TIERS) for name in names}
    may_have = {(TIERS[index], name): quotas.of(name).slabs_of_tier(index) for index in range(len(SLABS)) for name in names}
    return {
        "kvstore_node_tenant_slabs": {(TIERS[index], name): use[name].slabs[index] for index in range(len(SLABS)) for name in names},
        "kvstore_node_tenant_quota_slabs": {place: limit for place, limit in may_have.items() if limit is not None},
        "kvstore_node_tenant_bytes": {(tier, name): use[name].tiers[index] for index, tier in enumerate(TIERS) for name in names},
        "kvstore_node_tenant_quota_bytes": {place: limit for place, limit in limits.items() if limit is not None},
    }
