"""Metrics: what one is, and the list of all, by the daemon that has them.

docs/metrics.md, dashboards and alerts are made of the list, and a test holds daemons to it. Beside these each daemon has those of its
process (`process_...`, by prometheus_client).
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.telemetry.metrics.histogram import HistogramSnapshot


class MetricKind(enum.StrEnum):
    COUNTER = "counter"
    """Only grows, until the process begins anew; its name in the text ends in `_total`."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    """Times in seconds, in the buckets of histogram.py."""


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` is without `_total`; a unit is its last word: seconds or bytes. `labels` have few values, and none is a key's."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        return next((unit for unit in ("seconds", "bytes") if self.name.endswith(f"_{unit}")), "")

    @property
    def shown_name(self) -> str:
        """As a query names it; of a histogram without `_bucket`, `_sum` and `_count`."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name


Value = float | HistogramSnapshot
Reading = float | Mapping[tuple[str, ...], Value]
"""Of one metric: a number, or, of one with labels, a number or a histogram's counts by the labels' values."""
Readings = Mapping[str, Reading]
"""By the metrics' names."""


C, G, H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
SPANS: Final = "Spans of traces: exported, failed (the collector did not take them), dropped (too many waited)."

NODE: Final = (
    Metric("kvstore_node_info", G, "1, of the node with this name and version.", ("name", "version")),
    Metric(
        "kvstore_node_certificate_valid_seconds",
        G,
        "Until the first certificate in the file of a setting ends: tls_ca, tls_cert, http_tls_cert.",
        ("setting",),
    ),
    Metric("kvstore_node_ready", G, "1 while it serves: a master knows it and its blocks, and it is not to be stopped."),
    Metric(
        "kvstore_node_request_duration_seconds",
        H,
        "Requests of clients and nodes, from message to answer.",
        ("operation",),
    ),
    Metric("kvstore_node_requests_refused", C, "Requests that were answered with an error, by which.", ("reason",)),
    Metric("kvstore_node_trace_spans", C, SPANS, ("outcome",)),
    Metric("kvstore_node_connections", G, "Open connections of clients and other nodes."),
    Metric("kvstore_node_tier_capacity_bytes", G, "What the tier may hold.", ("tier",)),
    Metric("kvstore_node_tier_used_bytes", G, "What its blocks take.", ("tier",)),
    Metric("kvstore_node_tier_quarantined_bytes", G, "Freed, and not to be used again while a reader may still look at it.", ("tier",)),
    Metric("kvstore_node_tier_blocks", G, "Blocks with a copy in the tier.", ("tier",)),
    Metric("kvstore_node_tier_healthy", G, "1, or 0 while the tier is not used because its device failed.", ("tier",)),
    Metric("kvstore_node_tier_hits", C, "Blocks read, by the fastest tier they were in and whose they are.", ("tier", "tenant")),
    Metric(
        "kvstore_node_tier_evictions",
        C,
        "Blocks that left the node from the tier: for room there, or in the table, or for their tenant's quota.",
        ("tier", "reason"),
    ),
    Metric("kvstore_node_tenant_bytes", G, "What a tenant takes of the tier; of those that take most of DRAM.", ("tier", "tenant")),
    Metric("kvstore_node_tenant_quota_bytes", G, "What it may take there; of those that have a limit.", ("tier", "tenant")),
    Metric("kvstore_node_tenant_slabs", G, "Slabs in which a tenant has slots; of those that take most of DRAM.", ("tier", "tenant")),
    Metric("kvstore_node_tenant_quota_slabs", G, "In how many it may; of those that have a limit.", ("tier", "tenant")),
    Metric("kvstore_node_quota_refused", C, "Connections and requests beyond their tenant's quota, by which.", ("reason",)),
    Metric("kvstore_node_tier_demotions", C, "Blocks copied from the tier to a lower one.", ("tier",)),
    Metric("kvstore_node_tier_promotions", C, "Blocks copied into the tier from a lower one.", ("tier",)),
    Metric("kvstore_node_tier_device_written_bytes", C, "Bytes written to the tier's device, headers and rounding included.", ("tier",)),
    Metric("kvstore_node_eviction_age_seconds", H, "How long ago what was evicted had been read or put last.", ("tier",)),
    Metric("kvstore_node_misses", C, "Blocks that were asked for here and are not here."),
    Metric("kvstore_node_corrupt_reads", C, "Values that were not what was put, found by their checksum: they were not given out."),
    Metric("kvstore_node_written_bytes", C, "Values taken in."),
    Metric("kvstore_node_read_bytes", C, "Values given out by messages and leases."),
    Metric("kvstore_node_table_bytes", G, "Memory of the block table, estimated."),
    Metric("kvstore_node_table_limit_bytes", G, "What it may take."),
    Metric("kvstore_node_index_bytes", G, "Shared memory of the index that clients of this host read."),
    Metric("kvstore_node_index_clients", G, "Clients of this host that read it."),
    Metric("kvstore_node_open_puts", G, "Puts that are being written."),
    Metric("kvstore_node_slots_ahead", G, "Slots that are opened ahead for the next put of a client of this host."),
    Metric("kvstore_node_slots_ahead_bytes", G, "Their bytes; they count as used, and for their tenant's quota."),
    Metric("kvstore_node_slots_ahead_puts", C, "Values that were put into such a slot."),
    Metric("kvstore_node_slots_ahead_returned", C, "Such slots that were taken back: they were idle, or another put had no room."),
    Metric("kvstore_node_leases", G, "Leases on values that are being read."),
    Metric("kvstore_node_holds", G, "Lookups whose blocks stay until they were loaded."),
    Metric("kvstore_node_held_blocks", G, "Blocks that stay for one."),
    Metric(
        "kvstore_node_unheld_blocks",
        C,
        "Blocks that lookups found and could not hold: a tenth of a tier or quota is held, or they had left.",
    ),
    Metric("kvstore_node_yielded_blocks", C, "Blocks whose hold ended early: nothing else could leave for a put, or a quota was lowered."),
    Metric("kvstore_node_tier_held_bytes", G, "Values that stay in the tier for a lookup.", ("tier",)),
    Metric("kvstore_node_waiting_requests", G, "Requests that wait for room."),
    Metric("kvstore_node_undecided_blocks", G, "Blocks that the master has not decided about."),
    Metric("kvstore_node_moving_blocks", G, "Blocks that are being copied between tiers."),
    Metric("kvstore_node_publish_backlog_events", G, "What has happened to blocks and the master has not acknowledged."),
    Metric("kvstore_node_copied_blocks", C, "Replicas fetched from other nodes."),
    Metric("kvstore_node_guest_blocks", C, "Of these, blocks that other nodes have spilled, for want of room."),
    Metric("kvstore_node_copied_bytes", C, "Their bytes."),
    Metric("kvstore_node_copies_failed", C, "Replicas that could not be fetched."),
    Metric("kvstore_node_copies_waiting", G, "Replicas to be fetched."),
    Metric("kvstore_node_engine_served_bytes", C, "What other hosts have read and written by the transfer engine."),
    Metric("kvstore_node_engine_connections", G, "Their connections to it."),
    Metric("kvstore_node_rail_delivered_bytes", C, "What this node's own transfers have moved by a rail.", ("transport", "rail")),
    Metric("kvstore_node_rail_failed_slices", C, "Slices that failed on a rail, and were tried on another one.", ("transport", "rail")),
    Metric("kvstore_node_rail_rests", C, "How often a path of the rail was left alone for a while since it failed.", ("transport", "rail")),
)
MASTER: Final = (
    Metric("kvstore_master_info", G, "1, of the master with this name and version.", ("name", "version")),
    Metric("kvstore_master_ready", G, "1 while it owns the catalog, or is fit to take it over."),
    Metric("kvstore_master_owner", G, "1 while it owns the catalog, or a partition of it."),
    Metric("kvstore_master_partitions", G, "Partitions of the key space."),
    Metric("kvstore_master_partitions_owned", G, "Of these, what it owns."),
    Metric("kvstore_master_epoch", G, "Epoch of the owner that it knows; 0: nobody owns the catalog."),
    Metric("kvstore_master_takeovers", C, "How often this process became the owner."),
    Metric("kvstore_master_request_duration_seconds", H, "Requests of clients and nodes, from message to answer.", ("operation",)),
    Metric("kvstore_master_requests_refused", C, "Requests that were answered with an error, by which.", ("reason",)),
    Metric("kvstore_master_trace_spans", C, SPANS, ("outcome",)),
    Metric("kvstore_master_control_duration_seconds", H, "Calls of the control plane.", ("method",)),
    Metric("kvstore_master_connections", G, "Open connections of clients and nodes."),
    Metric("kvstore_master_catalog_healthy", G, "1 while the catalog takes writes in time and tells what it should."),
    Metric("kvstore_master_catalog_commit_duration_seconds", H, "Time until a group of changes was durable, its tries in vain included."),
    Metric("kvstore_master_catalog_queue", G, "Batches of changes that wait to be written."),
    Metric("kvstore_master_catalog_size_bytes", G, "What the catalog takes: etcd's database, or LMDB's file; 0 in memory."),
    Metric("kvstore_master_catalog_records", G, "Blocks that have a record, as far as this master knows."),
    Metric(
        "kvstore_master_certificate_valid_seconds",
        G,
        "Until the first certificate in the file of a setting ends: tls_ca, tls_cert, http_tls_cert.",
        ("setting",),
    ),
    Metric(
        "kvstore_master_token_valid_seconds",
        G,
        "Until the first token of this kind and name in the tokens file ends, of the 20 that end first; those without an end are left out.",
        ("kind", "name"),
    ),
    Metric(
        "kvstore_master_audit_entries",
        C,
        "Changes by operators and refused requests that this master recorded, by action (docs/operations.md) and result: done, refused, "
        "failed.",
        ("action", "result"),
    ),
    Metric("kvstore_master_nodes", G, "Nodes by their state: syncing, alive, stopped (in an orderly way), dead.", ("state",)),
    Metric("kvstore_master_drained_nodes", G, "Nodes that are being emptied, or are."),
    Metric("kvstore_master_blocks", G, "Blocks that can be found."),
    Metric("kvstore_master_reservations", G, "Puts granted and not yet published."),
    Metric("kvstore_master_pinned_blocks", G, "Pinned blocks."),
    Metric("kvstore_master_quota_refused", C, "Connections and requests beyond their tenant's quota, by which.", ("reason",)),
    Metric("kvstore_master_keys_asked", C, "Keys in requests of clients."),
    Metric("kvstore_master_lookup_misses", C, "Of those looked up: not there."),
    Metric("kvstore_master_events_published", C, "Events of blocks that nodes told."),
    Metric("kvstore_master_blocks_compared", C, "Blocks that nodes did not name after a break of their link: their digests were the same."),
    Metric("kvstore_master_commands_failed", C, "Commands that a node did not carry out."),
    Metric("kvstore_master_copies_ordered", C, "Replicas that nodes were told to fetch."),
    Metric("kvstore_master_copies_entered", C, "Replicas that came to be."),
    Metric("kvstore_master_spilled_blocks", C, "Of these, blocks that nodes without room have spilled to others."),
    Metric("kvstore_master_spilled_bytes", C, "Their bytes."),
    Metric("kvstore_master_hot_copies", C, "Of the replicas that came to be, those of blocks that are read much."),
    Metric("kvstore_master_hot_copied_bytes", C, "Their bytes."),
    Metric("kvstore_master_hot_blocks", G, "Blocks that are to have copies because they are read much."),
    Metric("kvstore_master_instances", G, "Inference engines that report to the scheduler."),
    Metric("kvstore_master_scheduled", C, "Requests of engines that were given a place."),
    Metric("kvstore_master_schedule_rejections", C, "Requests of engines that were given none, by why.", ("reason",)),
    Metric("kvstore_master_scheduled_transfer_blocks", C, "Blocks that the scheduler had moved to where a request goes."),
)
CLIENT: Final = (
    Metric(
        "kvstore_client_operation_duration_seconds",
        H,
        "Calls of this client. Of get, get_into, put and exists of `Client` one in 61 is timed, and counts for those between.",
        ("operation",),
    ),
    Metric("kvstore_client_requests", C, "Calls, a batch being one."),
    Metric("kvstore_client_hits", C, "Blocks that were read, by the tier they came from.", ("tier",)),
    Metric("kvstore_client_misses", C, "Blocks that were not there."),
    Metric("kvstore_client_puts", C, "Blocks that were stored."),
    Metric("kvstore_client_already_present", C, "Puts that found their block stored."),
    Metric("kvstore_client_read_bytes", C, "Values read."),
    Metric("kvstore_client_written_bytes", C, "Values stored."),
    Metric("kvstore_client_engine_bytes", C, "Of both, what the transfer engine moved, to or from other hosts."),
    Metric("kvstore_client_stale_hints", C, "Reads that went to a node which no longer had the block."),
    Metric("kvstore_client_retries", C, "Requests sent again."),
    Metric("kvstore_client_checksum_failures", C, "Values that arrived damaged; no caller saw them."),
    Metric("kvstore_client_held_blocks", C, "Blocks that lookups found and hold."),
    Metric("kvstore_client_unheld_blocks", C, "Blocks that lookups found and no node would hold."),
    Metric("kvstore_client_trace_spans", C, SPANS, ("outcome",)),
)
ROUTER: Final = (
    Metric("kvstore_router_requests", C, "Requests of clients."),
    Metric("kvstore_router_active_requests", G, "Of these, being served."),
    Metric("kvstore_router_completed", C, "Answered to the end."),
    Metric(
        "kvstore_router_request_duration_seconds", H, "Requests that were taken on, from their first byte to the end, whichever it was."
    ),
    Metric("kvstore_router_time_to_first_token_seconds", H, "Streamed answers, from the request to their first part."),
    Metric("kvstore_router_rejections", C, "Not taken on, by why.", ("reason",)),
    Metric("kvstore_router_failures", C, "Failed for want of an engine or a master, or by their failure."),
    Metric("kvstore_router_disconnects", C, "Clients that were gone before the end."),
    Metric("kvstore_router_retries", C, "Requests scheduled again."),
    Metric("kvstore_router_routed_by_load", C, "Routed without their prefix, by why the prompt was not tokenised exactly.", ("reason",)),
    Metric("kvstore_router_token_mismatches", C, "Answers whose usage.prompt_tokens was not what the engine's /tokenize gave."),
    Metric("kvstore_router_prompt_tokens", C, "Tokens of prompts."),
    Metric("kvstore_router_prefix_tokens", C, "Of these, not computed: as engines say, or else as was foreseen."),
    Metric("kvstore_router_output_tokens", C, "Tokens of answers."),
    Metric("kvstore_router_trace_spans", C, SPANS, ("outcome",)),
)
SIDECAR: Final = (
    Metric("kvstore_sidecar_reporting", G, "1 while the scheduler knows the engine."),
    Metric("kvstore_sidecar_reports", C, "Reports that the master took."),
    Metric("kvstore_sidecar_failures", C, "Metrics of the engine that could not be had, and reports that were not taken."),
    Metric("kvstore_sidecar_trace_spans", C, SPANS, ("outcome",)),
)
PUBLISHER: Final = (
    Metric("kvstore_publisher_nodes", G, "Nodes whose events are published."),
    Metric("kvstore_publisher_batches", C, "Batches published."),
    Metric("kvstore_publisher_stored_blocks", C, "Blocks of which it was published that a node has them."),
    Metric("kvstore_publisher_removed_blocks", C, "Blocks of which it was published that a node has them no more."),
    Metric("kvstore_publisher_lost_blocks", C, "Blocks whose events a node had overwritten before it was asked for them."),
    Metric("kvstore_publisher_interruptions", C, "Nodes that were not heard for a while; AllBlocksCleared was published."),
    Metric("kvstore_publisher_registered", G, "Engines' publishers that other routers have registered by /register."),
)
METRICS: Final = NODE + MASTER + CLIENT + ROUTER + SIDECAR + PUBLISHER
