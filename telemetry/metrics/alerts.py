"""Prometheus alert rules over the metrics of metric.py, from which deploy/prometheus/alerts.yml is generated."""

import enum
from dataclasses import dataclass
from typing import Final


class Severity(enum.StrEnum):
    """Severity of an alert."""

    CRITICAL = "critical"
    """Blocks are lost, or no puts or lookups succeed: act now."""
    WARNING = "warning"
    """Degraded, or will fail: act this week."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule: `expression` is PromQL, and fires after `hold`. `action` is the operator's next step, as in
    docs/operations.md."""

    name: str
    expression: str
    hold: str
    severity: Severity
    summary: str
    action: str


def _quantile(share: float, histogram: str, by: str, over: str = "5m") -> str:
    return f"histogram_quantile({share:g}, sum by (le, {by}) (rate({histogram}_bucket[{over}])))"


CRITICAL, WARNING = Severity.CRITICAL, Severity.WARNING
ENDS_SOON_S: Final = 14 * 86_400
"""Time left to replace a certificate or a token."""
ALERTS: Final = (
    Alert(
        "KvstoreDaemonDown",
        'up{job=~"kvstore.*"} == 0',
        "1m",
        CRITICAL,
        "{{ $labels.instance }} does not answer on its HTTP port.",
        "Check the process; the last lines of its log have the reason of its stop.",
    ),
    Alert(
        "KvstoreNotReady",
        "kvstore_node_ready == 0 or kvstore_master_ready == 0",
        "2m",
        CRITICAL,
        "{{ $labels.instance }} is alive but not ready.",
        "GET /readyz lists the reasons.",
    ),
    Alert(
        "KvstoreNoOwner",
        # By job, as one Prometheus may watch several clusters. During a failover two masters may count a partition.
        "sum by (job) (kvstore_master_partitions_owned) < max by (job) (kvstore_master_partitions)",
        "30s",
        CRITICAL,
        "No master of {{ $labels.job }} owns the catalog, or one of its partitions: puts wait, and new blocks are not found.",
        "kvstore status shows the error of each master; etcd needs a majority of its members.",
    ),
    Alert(
        "KvstoreNodeDead",
        'kvstore_master_nodes{state="dead"} > 0',
        "1m",
        WARNING,
        "{{ $value }} nodes are dead: blocks without another replica are misses.",
        "kvstore nodes lists them. Restart them, or remove them with kvstore forget.",
    ),
    Alert(
        "KvstoreCertificateEnds",
        f"kvstore_master_certificate_valid_seconds < {ENDS_SOON_S} or kvstore_node_certificate_valid_seconds < {ENDS_SOON_S}",
        "1m",
        WARNING,
        "The certificate of {{ $labels.setting }} at {{ $labels.instance }} expires in {{ $value | humanizeDuration }}.",
        "Replace the file: it is reloaded without a restart (docs/security.md, TLS).",
    ),
    Alert(
        "KvstoreTokenEnds",
        # All masters share the file: one alert, not three.
        f"min by (job, kind, name) (kvstore_master_token_valid_seconds) < {ENDS_SOON_S}",
        "1m",
        WARNING,
        "A token of {{ $labels.kind }} {{ $labels.name }} expires in {{ $value | humanizeDuration }}.",
        "kvstore token ls lists it; add a new one, distribute it, and remove the old one (docs/security.md, Rotation).",
    ),
    Alert(
        "KvstoreCatalogUnhealthy",
        "kvstore_master_catalog_healthy == 0",
        "1m",
        CRITICAL,
        "The catalog of {{ $labels.instance }} is unhealthy.",
        "kvstore status shows the error: etcd unreachable, without a leader or full, or a failing disk.",
    ),
    Alert(
        "KvstoreCatalogSlow",
        f"{_quantile(0.99, 'kvstore_master_catalog_commit_duration_seconds', 'instance')} > 0.5",
        "5m",
        WARNING,
        "The p99 of catalog commits is {{ $value | humanizeDuration }}.",
        "Check etcd's disks (etcd_disk_wal_fsync_duration_seconds) and the network to it.",
    ),
    Alert(
        "KvstoreTakeovers",
        "sum by (job) (increase(kvstore_master_takeovers_total[1h])) > 3 * max by (job) (kvstore_master_partitions)",
        "0s",
        WARNING,
        "The catalog of {{ $labels.job }}, or a partition of it, had {{ $value }} failovers within an hour.",
        "Masters renew their leases too slowly: give them more CPU, or a longer lease_ttl_s.",
    ),
    Alert(
        "KvstoreTierFailed",
        "kvstore_node_tier_healthy == 0",
        "1m",
        CRITICAL,
        "The {{ $labels.tier }} tier of {{ $labels.instance }} is out of use: its device failed.",
        "kvstore tiers shows the error. Drain the node, replace the disk, restart the node.",
    ),
    Alert(
        "KvstoreCorruptReads",
        "increase(kvstore_node_corrupt_reads_total[1h]) > 0",
        "0s",
        CRITICAL,
        "{{ $labels.instance }} read values with a wrong checksum; none was returned to a client.",
        "Memory or a disk is failing: check the kernel log, and drain the node.",
    ),
    Alert(
        "KvstoreEvictedYoung",
        f"{_quantile(0.5, 'kvstore_node_eviction_age_seconds', 'instance', '10m')} < 60",
        "15m",
        WARNING,
        "The median age of blocks evicted by {{ $labels.instance }} is {{ $value | humanizeDuration }}.",
        "The cache is too small for its load: add nodes, dram or nvme; kvstore plan computes how much.",
    ),
    Alert(
        "KvstoreTableFull",
        'sum by (instance) (rate(kvstore_node_tier_evictions_total{reason="table"}[10m])) > 0'
        " and sum by (instance) (kvstore_node_tier_used_bytes) < 0.8 * sum by (instance) (kvstore_node_tier_capacity_bytes)",
        "15m",
        WARNING,
        "{{ $labels.instance }} evicts blocks because its block table is full, while its tiers have free space.",
        "Its blocks are smaller than the table was sized for: raise table_share.",
    ),
    Alert(
        "KvstorePutsWait",
        "min_over_time(kvstore_node_waiting_requests[5m]) > 0",
        "0s",
        WARNING,
        "Requests have been waiting for free space at {{ $labels.instance }} for 5 minutes.",
        "Pins and leases prevent eviction, or the NVMe tier is slower than the puts.",
    ),
    Alert(
        "KvstorePublishBacklog",
        "kvstore_node_publish_backlog_events > 100000",
        "2m",
        WARNING,
        "The directory is {{ $value }} events behind {{ $labels.instance }}.",
        "The master or its catalog is too slow, or unreachable.",
    ),
    Alert(
        "KvstoreRefusedCredentials",
        'sum by (instance) (rate({__name__=~"kvstore_(master|node)_requests_refused_total", reason="unauthorized"}[5m])) > 1',
        "5m",
        WARNING,
        "{{ $labels.instance }} refuses {{ $value }} credentials a second.",
        "An engine has an old token, or tokens are being guessed: kvstore audit --refused lists the addresses.",
    ),
    Alert(
        "KvstoreRequestsSlow",
        f"{_quantile(0.99, 'kvstore_node_request_duration_seconds', 'instance, operation')} > 0.5",
        "10m",
        WARNING,
        "The p99 of {{ $labels.operation }} requests at {{ $labels.instance }} is {{ $value | humanizeDuration }}.",
        "GET /debug/profile shows where time is spent; a swapping or throttled host is the usual cause.",
    ),
    Alert(
        "KvstoreRouterFails",
        "sum by (instance) (rate(kvstore_router_failures_total[5m])) > 0.05 * sum by (instance) (rate(kvstore_router_requests_total[5m]))",
        "5m",
        CRITICAL,
        "More than 5 % of the requests to {{ $labels.instance }} fail without an engine or a master.",
        "GET /readyz shows whether a scheduler responds, kvstore instances lists the engines.",
    ),
    Alert(
        "KvstoreQuotaRefuses",
        'sum by (instance, reason) (rate({__name__=~"kvstore_(master|node)_quota_refused_total"}[5m])) > 1',
        "10m",
        WARNING,
        "{{ $labels.instance }} refuses {{ $value }} requests a second over a tenant's quota of {{ $labels.reason }}.",
        "kvstore quota show lists the tenants; raise the quota with kvstore quota set, or reduce the tenant's load.",
    ),
    Alert(
        "KvstoreRailRests",
        "increase(kvstore_node_rail_rests_total[10m]) > 3",
        "0s",
        WARNING,
        "Rail {{ $labels.rail }} of {{ $labels.instance }} fails repeatedly.",
        "Check its cable, switch port and driver; transfers use the other rails meanwhile.",
    ),
)
