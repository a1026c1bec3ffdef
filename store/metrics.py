"""Metrics of a node: eviction ages, request statistics, and the readings of all metrics. Called from the node's loop."""

import heapq
import logging
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import COPY_REASONS
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
"""Interval of the log line about evictions from one tier."""
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
"""Metric names, without `kvstore_node_`, whose status counter has another name."""


class _LoggedEvictions(NamedTuple):
    """Eviction counts of a tier at its last log line."""

    at_ns: int
    evictions: int
    table_evictions: int
    quota_evictions: int


class NodeMetrics:
    """Collector of a node's metrics. `requests` is the server's observer."""

    def __init__(self) -> None:
        self.requests = RequestMetrics()
        self._clock = AccessClock()
        self._ages: dict[int, Histogram] = {}
        self.eviction_ages_s: dict[int, float] = {}
        """By tier: time since the last read of a block that was evicted lately."""
        self._logged: dict[int, _LoggedEvictions] = {}

    def sample(self, table: BlockTable, now_ns: int) -> None:
        """Record the ages of blocks evicted since the last call. Called ten times a second."""
        self._clock.sample(table.accesses, now_ns)
        for index, _, counts, _ in table.levels():
            counts.merge_rare_tenants()
            if not counts.evicted:
                continue
            evicted, counts.evicted = counts.evicted, []
            ages = self._ages.setdefault(index, Histogram(AGE_BOUNDS_S))
            for access in evicted:
                ages.record(self._clock.age_ns(access, now_ns))
            self.eviction_ages_s[index] = self._clock.age_ns(evicted[-1], now_ns) / 1e9
            if log.isEnabledFor(logging.INFO) and self._is_due(index, now_ns):
                # Sorted for the log line only: a full node evicts thousands of blocks per call.
                self._log_evictions(index, counts, self._clock.age_ns(sorted(evicted)[len(evicted) // 2], now_ns), now_ns)

    def age_s(self, access: int, now_ns: int) -> float:
        """Age of an access, to about a second."""
        return self._clock.age_ns(access, now_ns) / 1e9

    def _is_due(self, index: int, now_ns: int) -> bool:
        """Return True if the tier's log line is due."""
        readings = self._logged.get(index)
        return readings is None or now_ns - readings.at_ns >= EVICTIONS_LOG_NS

    def _log_evictions(self, index: int, counts: TierCounts, median_age_ns: int, now_ns: int) -> None:
        """Log the evictions since the last line, with the median age of the latest."""
        before = self._logged.get(index, _LoggedEvictions(0, 0, 0, 0))
        blocks = counts.evictions - before.evictions
        for_table = counts.table_evictions - before.table_evictions
        for_quota = counts.quota_evictions - before.quota_evictions
        self._logged[index] = _LoggedEvictions(now_ns, counts.evictions, counts.table_evictions, counts.quota_evictions)
        tier, age_s = TIERS[index], round(median_age_ns / 1e9, 1)
        text = "%d blocks evicted from %s since the last report, %d of them because of the block limit, %d because of a quota"
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
        """Return the readings of all metrics in NODE. `own` are those that the node measures itself."""
        names = {metric.name: metric.name.removeprefix("kvstore_node_") for metric in NODE if not metric.labels}
        readings: dict[str, Reading] = {
            name: counters[counter] for name, short in names.items() if (counter := COUNTERS.get(short, short)) in counters
        }
        readings |= own
        readings["kvstore_node_request_duration_seconds"] = self.requests.durations()
        readings["kvstore_node_requests_refused"] = self.requests.refusals()
        for field in ("capacity_bytes", "used_bytes", "quarantined_bytes", "blocks", "demotions", "promotions"):
            readings[f"kvstore_node_tier_{field}"] = {(tier.name,): getattr(tier, field) for tier in tiers}
        readings["kvstore_node_tier_healthy"] = {(tier.name,): int(tier.health == "ok") for tier in tiers}
        readings["kvstore_node_tier_held_bytes"] = {(TIERS[index],): table.holds.held_bytes(index) for index, *_ in table.levels()}
        readings["kvstore_node_tier_device_written_bytes"] = {(TIERS[index],): tier.written_bytes for index, tier, _, _ in table.levels()}
        levels = [(TIERS[index], counts) for index, _, counts, _ in table.levels()]
        readings["kvstore_node_tier_hits"] = {
            (tier, tenant): count for tier, counts in levels for tenant, count in counts.tenant_hits.items()
        }
        readings["kvstore_node_tier_evictions"] = {
            (tier, reason): count for tier, counts in levels for reason, count in counts.by_reason().items()
        }
        for name in ("copied_blocks", "copied_bytes"):
            readings[f"kvstore_node_{name}"] = {(reason,): counters[f"{name}_{reason}"] for reason in COPY_REASONS}
        readings |= _of_tenants(table)
        readings["kvstore_node_eviction_age_seconds"] = {(TIERS[index],): ages.counts() for index, ages in self._ages.items()}
        rails = engine.rails() if engine is not None else {}
        for field in ("delivered_bytes", "failed_slices", "rests"):
            readings[f"kvstore_node_rail_{field}"] = {name: getattr(count, field) for name, count in rails.items()}
        return readings


def _of_tenants(table: BlockTable) -> dict[str, Reading]:
    """Return usage and quotas of the tenants that use the most DRAM."""
    use, quotas = table.quotas.use(), table.quotas.now
    names = heapq.nlargest(MAX_TENANTS, use, key=lambda name: use[name].tiers[DRAM])
    limits = {(tier, name): quotas.of(name).of_tier(index) for index, tier in enumerate(TIERS) for name in names}
    may_have = {(TIERS[index], name): quotas.of(name).slabs_of_tier(index) for index in range(len(SLABS)) for name in names}
    return {
        "kvstore_node_tenant_slabs": {(TIERS[index], name): use[name].slabs[index] for index in range(len(SLABS)) for name in names},
        "kvstore_node_tenant_quota_slabs": {labels: limit for labels, limit in may_have.items() if limit is not None},
        "kvstore_node_tenant_bytes": {(tier, name): use[name].tiers[index] for index, tier in enumerate(TIERS) for name in names},
        "kvstore_node_tenant_quota_bytes": {labels: limit for labels, limit in limits.items() if limit is not None},
    }
