"""When an operator is told that something is wrong: rules over the metrics of catalog.py, which deploy/prometheus/alerts.yml is made of."""

import enum
from dataclasses import dataclass
from typing import Final


class Severity(enum.StrEnum):
    CRITICAL = "critical"
    """Blocks are lost, or nobody can put or find any: now."""
    WARNING = "warning"
    """It gets there, or it costs: this week."""


@dataclass(frozen=True, slots=True)
class Alert:
    """`expression` is PromQL; it holds for `hold` before somebody is told. `action` says what to do, as docs/operations.md does."""

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
"""Time to replace a certificate or a token."""
ALERTS: Final = (
    Alert(
        "KvstoreDaemonDown",
        'up{job=~"kvstore.*"} == 0',
        "1m",
        CRITICAL,
        "{{ $labels.instance }} does not answer on its HTTP port.",
        "Is the process there? Its log's last lines say why it stopped.",
    ),
    Alert(
        "KvstoreNotReady",
        "kvstore_node_ready == 0 or kvstore_master_ready == 0",
        "2m",
        CRITICAL,
        "{{ $labels.instance }} lives and does not serve.",
        "GET /readyz of it says why, a line a reason.",
    ),
    Alert(
        "KvstoreNoOwner",
        # By job: several clusters may be watched by one Prometheus. While one partition changes hands two masters may count it.
        "sum by (job) (kvstore_master_partitions_owned) < max by (job) (kvstore_master_partitions)",
        "30s",
        CRITICAL,
        "Of {{ $labels.job }} no master owns the catalog, or one of its partitions: puts wait, and nothing new is found.",
        "kvstore status names each master's trouble; etcd needs a majority of its members.",
    ),
    Alert(
        "KvstoreNodeDead",
        'kvstore_master_nodes{state="dead"} > 0',
        "1m",
        WARNING,
        "{{ $value }} nodes are dead: what only they held is a miss.",
        "kvstore nodes names them. Start them again, or kvstore forget those that are gone for good.",
    ),
    Alert(
        "KvstoreCertificateEnds",
        f"kvstore_master_certificate_valid_seconds < {ENDS_SOON_S} or kvstore_node_certificate_valid_seconds < {ENDS_SOON_S}",
        "1m",
        WARNING,
        "The certificate of {{ $labels.setting }} at {{ $labels.instance }} ends in {{ $value | humanizeDuration }}.",
        "Put a new one in its place: it is read again without a restart (docs/security.md, TLS).",
    ),
    Alert(
        "KvstoreTokenEnds",
        # Every master has the same file: one alert, not three.
        f"min by (job, kind, name) (kvstore_master_token_valid_seconds) < {ENDS_SOON_S}",
        "1m",
        WARNING,
        "A token of {{ $labels.kind }} {{ $labels.name }} ends in {{ $value | humanizeDuration }}.",
        "kvstore token ls names it; add a new one, hand it out, and take the old one out (docs/security.md, Rotation).",
    ),
    Alert(
        "KvstoreCatalogUnhealthy",
        "kvstore_master_catalog_healthy == 0",
        "1m",
        CRITICAL,
        "The catalog of {{ $labels.instance }} is in trouble.",
        "kvstore status says how: etcd out of reach, without a leader or full, a disk that fails.",
    ),
    Alert(
        "KvstoreCatalogSlow",
        f"{_quantile(0.99, 'kvstore_master_catalog_commit_duration_seconds', 'instance')} > 0.5",
        "5m",
        WARNING,
        "A hundredth of the catalog's commits take {{ $value | humanizeDuration }} and more.",
        "Look at etcd's disks (etcd_disk_wal_fsync_duration_seconds) and at the network to it.",
    ),
    Alert(
        "KvstoreTakeovers",
        "sum by (job) (increase(kvstore_master_takeovers_total[1h])) > 3 * max by (job) (kvstore_master_partitions)",
        "0s",
        WARNING,
        "The catalog of {{ $labels.job }}, or a partition of it, changed hands {{ $value }} times within an hour.",
        "Masters that are too slow to renew a lease: give them processors, or a longer lease_ttl_s.",
    ),
    Alert(
        "KvstoreTierFailed",
        "kvstore_node_tier_healthy == 0",
        "1m",
        CRITICAL,
        "The {{ $labels.tier }} tier of {{ $labels.instance }} is not used: its device failed.",
        "kvstore tiers says with which error. Drain the node, replace the disk, start it again.",
    ),
    Alert(
        "KvstoreCorruptReads",
        "increase(kvstore_node_corrupt_reads_total[1h]) > 0",
        "0s",
        CRITICAL,
        "{{ $labels.instance }} read values that were not what was put; no reader saw them.",
        "Memory or a disk is failing: look at the kernel's log, and drain the node.",
    ),
    Alert(
        "KvstoreEvictedYoung",
        f"{_quantile(0.5, 'kvstore_node_eviction_age_seconds', 'instance', '10m')} < 60",
        "15m",
        WARNING,
        "Half of what {{ $labels.instance }} evicts was read or put within {{ $value | humanizeDuration }}.",
        "The cache is too small for its load: more nodes, more dram or nvme; kvstore plan says how much.",
    ),
    Alert(
        "KvstoreTableFull",
        'sum by (instance) (rate(kvstore_node_tier_evictions_total{reason="table"}[10m])) > 0'
        " and sum by (instance) (kvstore_node_tier_used_bytes) < 0.8 * sum by (instance) (kvstore_node_tier_capacity_bytes)",
        "15m",
        WARNING,
        "{{ $labels.instance }} evicts blocks for want of room in its block table, while its tiers have room.",
        "Its blocks are smaller than the table was made for: give it a larger table_share.",
    ),
    Alert(
        "KvstorePutsWait",
        "min_over_time(kvstore_node_waiting_requests[5m]) > 0",
        "0s",
        WARNING,
        "Requests have waited for room at {{ $labels.instance }} for 5 minutes without a break.",
        "Pins and leases that keep all that could leave, or an NVMe tier that is slower than what is put.",
    ),
    Alert(
        "KvstorePublishBacklog",
        "kvstore_node_publish_backlog_events > 100000",
        "2m",
        WARNING,
        "The master is {{ $value }} events behind what {{ $labels.instance }} holds.",
        "The master or its catalog is too slow, or out of reach.",
    ),
    Alert(
        "KvstoreRefusedCredentials",
        'sum by (instance) (rate({__name__=~"kvstore_(master|node)_requests_refused_total", reason="unauthorized"}[5m])) > 1',
        "5m",
        WARNING,
        "{{ $labels.instance }} refuses {{ $value }} credentials a second.",
        "An engine with an old token, or somebody who guesses: kvstore audit --refused names the addresses.",
    ),
    Alert(
        "KvstoreRequestsSlow",
        f"{_quantile(0.99, 'kvstore_node_request_duration_seconds', 'instance, operation')} > 0.5",
        "10m",
        WARNING,
        "A hundredth of the {{ $labels.operation }} requests at {{ $labels.instance }} take {{ $value | humanizeDuration }} and more.",
        "GET /debug/profile of it says what it does meanwhile; a swapped or throttled host is the usual cause.",
    ),
    Alert(
        "KvstoreRouterFails",
        "sum by (instance) (rate(kvstore_router_failures_total[5m])) > 0.05 * sum by (instance) (rate(kvstore_router_requests_total[5m]))",
        "5m",
        CRITICAL,
        "More than a twentieth of the requests to {{ $labels.instance }} fail for want of an engine or a master.",
        "GET /readyz of it says whether a scheduler answers, kvstore instances which engines do.",
    ),
    Alert(
        "KvstoreQuotaRefuses",
        'sum by (instance, reason) (rate({__name__=~"kvstore_(master|node)_quota_refused_total"}[5m])) > 1',
        "10m",
        WARNING,
        "{{ $labels.instance }} refuses {{ $value }} times a second what is beyond a tenant's quota of {{ $labels.reason }}.",
        "kvstore quota show says whose; kvstore quota set gives more, or the tenant's engines ask for less.",
    ),
    Alert(
        "KvstoreRailRests",
        "increase(kvstore_node_rail_rests_total[10m]) > 3",
        "0s",
        WARNING,
        "Rail {{ $labels.rail }} of {{ $labels.instance }} fails again and again.",
        "Its cable, switch port or driver; transfers go by the other rails meanwhile.",
    ),
)
