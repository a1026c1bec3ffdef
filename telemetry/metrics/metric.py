"""Definition of metrics, and the list of all metrics by daemon.

docs/metrics.md, dashboards and alerts are generated from the list, and tests compare daemons with it. Each daemon also
exports its process metrics (`process_...`, by prometheus_client).
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.telemetry.metrics.histogram import HistogramSnapshot


class MetricKind(enum.StrEnum):
    """Type of a metric."""

    COUNTER = "counter"
    """Monotonic within a process; exported with the suffix `_total`."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    """Durations in seconds, in the buckets of histogram.py."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name` is without `_total` and ends with its unit, seconds or bytes, if it has one. Labels have few
    values, and no keys."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        return next((unit for unit in ("seconds", "bytes") if self.name.endswith(f"_{unit}")), "")

    @property
    def exported_name(self) -> str:
        """Name in queries; of a histogram without `_bucket`, `_sum` and `_count`."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name


Value = float | HistogramSnapshot
Reading = float | Mapping[tuple[str, ...], Value]
"""Value of one metric: a number, or a mapping from label values to numbers or histograms."""
Readings = Mapping[str, Reading]
"""Values by metric name."""


C, G, H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
SPANS: Final = "Spans by outcome: exported, failed (refused by the collector), dropped (queue full)."

NODE: Final = (
    Metric("kvstore_node_info", G, "1; name and version of the node.", ("name", "version")),
    Metric(
        "kvstore_node_certificate_valid_seconds",
        G,
        "Time until the first certificate in a setting's file expires: tls_ca, tls_cert, http_tls_cert.",
        ("setting",),
    ),
    Metric("kvstore_node_ready", G, "1 while ready: a master knows the node and its blocks, and it is not shutting down."),
    Metric(
        "kvstore_node_request_duration_seconds",
        H,
        "Duration of requests of clients and nodes, from message to reply.",
        ("operation",),
    ),
    Metric("kvstore_node_requests_refused", C, "Requests refused with an error, by error.", ("reason",)),
    Metric("kvstore_node_trace_spans", C, SPANS, ("outcome",)),
    Metric("kvstore_node_connections", G, "Open connections of clients and other nodes."),
    Metric("kvstore_node_tier_capacity_bytes", G, "Capacity of the tier.", ("tier",)),
    Metric("kvstore_node_tier_used_bytes", G, "Space used by blocks.", ("tier",)),
    Metric("kvstore_node_tier_quarantined_bytes", G, "Freed space that is not reused while a reader may still read it.", ("tier",)),
    Metric("kvstore_node_tier_blocks", G, "Blocks with a copy in the tier.", ("tier",)),
    Metric("kvstore_node_tier_healthy", G, "1; 0 while the tier is out of use because its device failed.", ("tier",)),
    Metric("kvstore_node_tier_hits", C, "Blocks read, by the fastest tier that had them and by tenant.", ("tier", "tenant")),
    Metric(
        "kvstore_node_tier_evictions",
        C,
        "Blocks evicted from the node's tier, by reason: tier full (room), not worth a write to NVMe, secondary (its home keeps it), "
        "block table full, or tenant's quota.",
        ("tier", "reason"),
    ),
    Metric("kvstore_node_tenant_bytes", G, "Space used by a tenant, for those that use most DRAM.", ("tier", "tenant")),
    Metric("kvstore_node_tenant_quota_bytes", G, "Quota of a tenant in the tier, for those with a limit.", ("tier", "tenant")),
    Metric("kvstore_node_tenant_slabs", G, "Slabs with slots of a tenant, for those that use most DRAM.", ("tier", "tenant")),
    Metric("kvstore_node_tenant_quota_slabs", G, "Slab quota of a tenant, for those with a limit.", ("tier", "tenant")),
    Metric("kvstore_node_quota_refused", C, "Connections and requests over their tenant's quota, by quota.", ("reason",)),
    Metric("kvstore_node_tier_demotions", C, "Blocks copied from the tier to a lower one.", ("tier",)),
    Metric("kvstore_node_tier_promotions", C, "Blocks copied into the tier from a lower one.", ("tier",)),
    Metric("kvstore_node_tier_device_written_bytes", C, "Bytes written to the tier's device, headers and rounding included.", ("tier",)),
    Metric("kvstore_node_eviction_age_seconds", H, "Time since the last access of evicted blocks.", ("tier",)),
    Metric("kvstore_node_misses", C, "Blocks that clients asked for and the node does not have."),
    Metric("kvstore_node_corrupt_reads", C, "Values with a wrong checksum; none was returned."),
    Metric("kvstore_node_written_bytes", C, "Bytes of values written by clients."),
    Metric("kvstore_node_read_bytes", C, "Bytes of values read by messages and leases."),
    Metric("kvstore_node_table_bytes", G, "Estimated memory of the block table."),
    Metric("kvstore_node_table_limit_bytes", G, "Memory limit of the block table."),
    Metric("kvstore_node_index_bytes", G, "Size of the shared-memory index for clients of this host."),
    Metric("kvstore_node_index_clients", G, "Clients of this host attached to the index."),
    Metric("kvstore_node_open_puts", G, "Open puts."),
    Metric("kvstore_node_slots_ahead", G, "Slots opened ahead for the next put of a local client."),
    Metric("kvstore_node_slots_ahead_bytes", G, "Bytes of slots ahead; they count as used, and against the tenant's quota."),
    Metric("kvstore_node_slots_ahead_puts", C, "Values put into slots ahead."),
    Metric("kvstore_node_slots_ahead_returned", C, "Slots ahead that were revoked, because they were idle or another put needed space."),
    Metric("kvstore_node_leases", G, "Leases on values being read."),
    Metric("kvstore_node_holds", G, "Active holds."),
    Metric("kvstore_node_held_blocks", G, "Blocks under a hold."),
    Metric(
        "kvstore_node_unheld_blocks",
        C,
        "Blocks found but not held: the limit of a tenth of a tier or quota was reached, or they were evicted.",
    ),
    Metric("kvstore_node_yielded_blocks", C, "Blocks whose hold ended early, for a put that could evict nothing else or a lowered quota."),
    Metric("kvstore_node_tier_held_bytes", G, "Bytes of values under a hold.", ("tier",)),
    Metric("kvstore_node_waiting_requests", G, "Requests waiting for free space."),
    Metric("kvstore_node_uncommitted_blocks", G, "Blocks not yet committed to the directory."),
    Metric("kvstore_node_moving_blocks", G, "Blocks being copied between tiers."),
    Metric("kvstore_node_publish_backlog_events", G, "Block events that the master has not acknowledged."),
    Metric(
        "kvstore_node_copied_blocks",
        C,
        "Replicas fetched from other nodes, by reason: replica, home, hot, drain, or prefetch (also for scheduled requests).",
        ("reason",),
    ),
    Metric("kvstore_node_secondary_blocks", C, "Blocks that another node, their home, fetched; their copies here are evicted first."),
    Metric("kvstore_node_secondary_bytes", C, "Their bytes."),
    Metric("kvstore_node_primary_again", C, "Secondary copies that are primary again, since the home has no copy."),
    Metric("kvstore_node_local_reads", C, "Blocks given to clients of the node's host."),
    Metric("kvstore_node_remote_reads", C, "Blocks given to clients of other hosts."),
    Metric("kvstore_node_reuse_exchanges", C, "Answers with what other nodes' eviction policies have learned of reuse."),
    Metric("kvstore_node_reuse_of_others", G, "Visits of prompts observed by other nodes that the eviction policies use."),
    Metric("kvstore_node_copied_bytes", C, "Their bytes.", ("reason",)),
    Metric("kvstore_node_copies_failed", C, "Failed fetches of replicas."),
    Metric("kvstore_node_copies_waiting", G, "Replicas waiting to be fetched."),
    Metric("kvstore_node_prefetched_blocks", C, "Blocks that a prefetch brought into DRAM, from NVMe or another node."),
    Metric("kvstore_node_prefetched_bytes", C, "Their bytes."),
    Metric("kvstore_node_prefetches_useful", C, "Prefetched blocks that were read before they left DRAM."),
    Metric("kvstore_node_prefetches_wasted", C, "Prefetched blocks that left DRAM unread, or were not read within 60 s."),
    Metric("kvstore_node_prefetches_late", C, "Blocks of the node's NVMe that were read before their prefetch was complete."),
    Metric(
        "kvstore_node_prefetches_refused",
        C,
        "Blocks not prefetched: 1/16 of DRAM is prefetched and unread, no slot became free, or the node drains.",
    ),
    Metric("kvstore_node_prefetches_expected", C, "Blocks queued for a prefetch because a retention hint expects their read."),
    Metric("kvstore_node_prefetches_waiting", G, "Blocks queued for a prefetch, or awaited from another node."),
    Metric("kvstore_node_prefetched_unread_bytes", G, "Bytes queued for a prefetch, or prefetched and not read yet."),
    Metric("kvstore_node_retained_blocks", G, "Blocks with a live priority of a retention hint, as of the last walk over all blocks."),
    Metric("kvstore_node_retention_hints_applied", C, "Blocks to which a retention hint was applied, once a hint."),
    Metric(
        "kvstore_node_retention_hints_ignored",
        C,
        "Blocks whose retention hint was ignored: a reader's low priority, or a session beyond the limit.",
    ),
    Metric("kvstore_node_retention_sessions", G, "Sessions of retention hints that have not ended."),
    Metric("kvstore_node_retention_sessions_ended", C, "Sessions that callers ended."),
    Metric("kvstore_node_retention_sessions_forgotten", C, "Sessions forgotten at the limit of 16,384 per tenant; their blocks stay."),
    Metric("kvstore_node_engine_served_bytes", C, "Bytes read and written by other hosts through the transfer engine."),
    Metric("kvstore_node_engine_connections", G, "Connections of other hosts to the transfer engine."),
    Metric("kvstore_node_rail_delivered_bytes", C, "Bytes moved by this node's transfers, per rail.", ("transport", "rail")),
    Metric("kvstore_node_rail_failed_slices", C, "Slices that failed on a rail and were retried on another.", ("transport", "rail")),
    Metric("kvstore_node_rail_rests", C, "Cooldowns of the rail's paths after a failure.", ("transport", "rail")),
)
MASTER: Final = (
    Metric("kvstore_master_info", G, "1; name and version of the master.", ("name", "version")),
    Metric("kvstore_master_ready", G, "1 while ready: it owns the catalog, or can take it over."),
    Metric("kvstore_master_owner", G, "1 while it owns the catalog or a partition."),
    Metric("kvstore_master_partitions", G, "Partitions of the key space."),
    Metric("kvstore_master_partitions_owned", G, "Partitions that it owns."),
    Metric("kvstore_master_epoch", G, "Epoch of the known owner; 0: none."),
    Metric("kvstore_master_takeovers", C, "Times that this process became the owner."),
    Metric(
        "kvstore_master_request_duration_seconds", H, "Duration of requests of clients and nodes, from message to reply.", ("operation",)
    ),
    Metric("kvstore_master_requests_refused", C, "Requests refused with an error, by error.", ("reason",)),
    Metric("kvstore_master_trace_spans", C, SPANS, ("outcome",)),
    Metric("kvstore_master_control_duration_seconds", H, "Duration of control-plane calls.", ("method",)),
    Metric("kvstore_master_connections", G, "Open connections of clients and nodes."),
    Metric("kvstore_master_catalog_healthy", G, "1 while the catalog accepts writes and reads in time."),
    Metric("kvstore_master_catalog_commit_duration_seconds", H, "Time until a group commit was durable, including failed attempts."),
    Metric("kvstore_master_catalog_queue", G, "Batches of changes waiting to be written."),
    Metric("kvstore_master_catalog_size_bytes", G, "Size of the catalog: etcd's database, or LMDB's file; 0 in memory."),
    Metric("kvstore_master_catalog_records", G, "Records of blocks known to this master."),
    Metric(
        "kvstore_master_certificate_valid_seconds",
        G,
        "Time until the first certificate in a setting's file expires: tls_ca, tls_cert, http_tls_cert.",
        ("setting",),
    ),
    Metric(
        "kvstore_master_token_valid_seconds",
        G,
        "Time until the first token of this kind and name expires, for the 20 that expire first.",
        ("kind", "name"),
    ),
    Metric(
        "kvstore_master_audit_entries",
        C,
        "Entries of the audit trail at this master, by action (docs/operations.md) and result: done, refused, failed.",
        ("action", "result"),
    ),
    Metric("kvstore_master_nodes", G, "Nodes by state: syncing, alive, stopped (cleanly), dead.", ("state",)),
    Metric("kvstore_master_drained_nodes", G, "Draining and drained nodes."),
    Metric("kvstore_master_blocks", G, "Blocks in the directory."),
    Metric("kvstore_master_reservations", G, "Reservations not yet committed."),
    Metric("kvstore_master_pinned_blocks", G, "Pinned blocks."),
    Metric("kvstore_master_quota_refused", C, "Connections and requests over their tenant's quota, by quota.", ("reason",)),
    Metric("kvstore_master_keys_asked", C, "Keys in client requests."),
    Metric("kvstore_master_lookup_misses", C, "Keys looked up and not found."),
    Metric("kvstore_master_events_published", C, "Block events published by nodes."),
    Metric("kvstore_master_blocks_compared", C, "Blocks skipped by incremental resync because their digests were equal."),
    Metric("kvstore_master_commands_failed", C, "Commands that failed at a node."),
    Metric("kvstore_master_copies_requested", C, "Replicas that nodes were asked to fetch."),
    Metric("kvstore_master_copies_completed", C, "Replicas entered into the directory."),
    Metric("kvstore_master_home_copies", C, "Of these, copies of nearly full nodes' blocks at their home nodes."),
    Metric("kvstore_master_home_copied_bytes", C, "Their bytes."),
    Metric(
        "kvstore_master_home_copies_skipped",
        C,
        "Blocks without a home copy, by reason: 65,536 waited (queue), it had left the writer's node (gone), its home had no space "
        "(space), or the copy did not arrive (failed).",
        ("reason",),
    ),
    Metric("kvstore_master_reuse_reports", C, "Reports of nodes on what their eviction policies have learned of reuse."),
    Metric("kvstore_master_reuse_refused", C, "Statistics in such reports that were ignored, because they cannot be right."),
    Metric("kvstore_master_hot_copies", C, "Completed replicas that are hot copies."),
    Metric("kvstore_master_hot_copied_bytes", C, "Their bytes."),
    Metric("kvstore_master_hot_blocks", G, "Blocks with a hot-copy target."),
    Metric("kvstore_master_instances", G, "Engine instances that report to the scheduler."),
    Metric("kvstore_master_scheduled", C, "Requests placed by the scheduler."),
    Metric("kvstore_master_schedule_rejections", C, "Requests rejected by the scheduler, by reason.", ("reason",)),
    Metric("kvstore_master_scheduled_transfer_blocks", C, "Blocks transferred for scheduled requests."),
    Metric("kvstore_master_scheduled_promoted_blocks", C, "Blocks that a node was told to read from NVMe for scheduled requests."),
)
CLIENT: Final = (
    Metric(
        "kvstore_client_operation_duration_seconds",
        H,
        "Duration of calls. For get, get_into, put and exists of `Client`, one in 61 is timed and counts for all.",
        ("operation",),
    ),
    Metric("kvstore_client_requests", C, "Calls, a batch counting once."),
    Metric("kvstore_client_hits", C, "Blocks read, by tier.", ("tier",)),
    Metric("kvstore_client_misses", C, "Blocks not found."),
    Metric("kvstore_client_puts", C, "Blocks stored."),
    Metric("kvstore_client_already_present", C, "Puts whose block was already stored."),
    Metric("kvstore_client_read_bytes", C, "Bytes of values read."),
    Metric("kvstore_client_written_bytes", C, "Bytes of values stored."),
    Metric("kvstore_client_engine_bytes", C, "Of both, bytes moved by the transfer engine, to or from other hosts."),
    Metric("kvstore_client_stale_hints", C, "Reads sent to a node that no longer had the block."),
    Metric("kvstore_client_retries", C, "Requests repeated."),
    Metric("kvstore_client_checksum_failures", C, "Values with a wrong checksum; none was returned."),
    Metric("kvstore_client_held_blocks", C, "Blocks held by lookups."),
    Metric("kvstore_client_unheld_blocks", C, "Blocks found by lookups and not held."),
    Metric("kvstore_client_lost_retention_hints", C, "Blocks whose retention hint, of a put or get, was not applied."),
    Metric("kvstore_client_trace_spans", C, SPANS, ("outcome",)),
)
ROUTER: Final = (
    Metric("kvstore_router_requests", C, "Requests of clients."),
    Metric("kvstore_router_active_requests", G, "Requests in progress."),
    Metric("kvstore_router_completed", C, "Requests answered completely."),
    Metric("kvstore_router_request_duration_seconds", H, "Duration of accepted requests, from the first byte to the end."),
    Metric("kvstore_router_time_to_first_token_seconds", H, "Time to the first part of streamed answers."),
    Metric("kvstore_router_rejections", C, "Requests rejected, by reason.", ("reason",)),
    Metric("kvstore_router_failures", C, "Requests that failed without, or by, an engine or a master."),
    Metric("kvstore_router_client_disconnects", C, "Clients that disconnected before the end."),
    Metric("kvstore_router_retries", C, "Requests rescheduled."),
    Metric(
        "kvstore_router_routed_by_load",
        C,
        "Requests routed without prefix, by the reason that the prompt was not tokenised exactly.",
        ("reason",),
    ),
    Metric("kvstore_router_token_mismatches", C, "Answers whose usage.prompt_tokens differed from the engine's /tokenize."),
    Metric("kvstore_router_prompt_tokens", C, "Prompt tokens."),
    Metric("kvstore_router_prefix_tokens", C, "Prompt tokens not computed, as engines report, or as predicted."),
    Metric("kvstore_router_output_tokens", C, "Output tokens."),
    Metric("kvstore_router_trace_spans", C, SPANS, ("outcome",)),
)
SIDECAR: Final = (
    Metric("kvstore_sidecar_reporting", G, "1 while the engine is registered with the scheduler."),
    Metric("kvstore_sidecar_reports", C, "Reports accepted by the master."),
    Metric("kvstore_sidecar_failures", C, "Failed reads of the engine's metrics, and failed reports."),
    Metric("kvstore_sidecar_trace_spans", C, SPANS, ("outcome",)),
)
PUBLISHER: Final = (
    Metric("kvstore_publisher_nodes", G, "Nodes whose events are published."),
    Metric("kvstore_publisher_batches", C, "Batches published."),
    Metric("kvstore_publisher_stored_blocks", C, "Blocks published as stored."),
    Metric("kvstore_publisher_removed_blocks", C, "Blocks published as removed."),
    Metric("kvstore_publisher_lost_blocks", C, "Blocks whose events a node overwrote before they were fetched."),
    Metric("kvstore_publisher_interruptions", C, "Interruptions of a node's events, each published as AllBlocksCleared."),
    Metric("kvstore_publisher_registered", G, "Engine publishers registered by routers through /register."),
)
METRICS: Final = NODE + MASTER + CLIENT + ROUTER + SIDECAR + PUBLISHER
