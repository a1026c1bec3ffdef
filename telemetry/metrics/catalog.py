"""Every metric there is, by who tells it: docs/metrics.md, dashboards and alerts are made of it, and a test holds daemons to it.

Beside these each daemon tells of its process (`process_...`, by prometheus_client).
"""

from typing import Final

from kvstore.telemetry.metrics.metric import Kind, Metric

C, G, H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

NODE: Final = (
    Metric("kvstore_node_info", G, "1, of the node with this name and version.", ("name", "version")),
    Metric("kvstore_node_ready", G, "1 while it serves: a master knows it and its blocks, and it is not to be stopped."),
    Metric(
        "kvstore_node_request_duration_seconds",
        H,
        "Requests of clients and nodes, from message to answer.",
        ("operation",),
    ),
    Metric("kvstore_node_requests_refused", C, "Requests that were answered with an error, by which.", ("reason",)),
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
        "Blocks that left the node from the tier: for room there, or in the table.",
        ("tier", "reason"),
    ),
    Metric("kvstore_node_tier_demotions", C, "Blocks copied from the tier to a lower one.", ("tier",)),
    Metric("kvstore_node_tier_promotions", C, "Blocks copied into the tier from a lower one.", ("tier",)),
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
    Metric("kvstore_node_leases", G, "Leases on values that are being read."),
    Metric("kvstore_node_waiting_requests", G, "Requests that wait for room."),
    Metric("kvstore_node_undecided_blocks", G, "Blocks that the master has not decided about."),
    Metric("kvstore_node_moving_blocks", G, "Blocks that are being copied between tiers."),
    Metric("kvstore_node_publish_backlog_events", G, "What has happened to blocks and the master has not acknowledged."),
    Metric("kvstore_node_copied_blocks", C, "Replicas fetched from other nodes."),
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
    Metric("kvstore_master_owner", G, "1 while it owns the catalog."),
    Metric("kvstore_master_epoch", G, "Epoch of the owner that it knows; 0: nobody owns the catalog."),
    Metric("kvstore_master_takeovers", C, "How often this process became the owner."),
    Metric("kvstore_master_request_duration_seconds", H, "Requests of clients and nodes, from message to answer.", ("operation",)),
    Metric("kvstore_master_requests_refused", C, "Requests that were answered with an error, by which.", ("reason",)),
    Metric("kvstore_master_control_duration_seconds", H, "Calls of the control plane.", ("method",)),
    Metric("kvstore_master_connections", G, "Open connections of clients and nodes."),
    Metric("kvstore_master_catalog_healthy", G, "1 while the catalog takes writes in time and tells what it should."),
    Metric("kvstore_master_catalog_commit_duration_seconds", H, "Time until a group of changes was durable, its tries in vain included."),
    Metric("kvstore_master_catalog_queue", G, "Batches of changes that wait to be written."),
    Metric("kvstore_master_catalog_size_bytes", G, "What the catalog takes: etcd's database, or LMDB's file; 0 in memory."),
    Metric("kvstore_master_catalog_records", G, "Blocks that have a record, as far as this master knows."),
    Metric("kvstore_master_nodes", G, "Nodes by their state: syncing, alive, dead.", ("state",)),
    Metric("kvstore_master_drained_nodes", G, "Nodes that are being emptied, or are."),
    Metric("kvstore_master_blocks", G, "Blocks that can be found."),
    Metric("kvstore_master_reservations", G, "Puts granted and not yet published."),
    Metric("kvstore_master_pinned_blocks", G, "Pinned blocks."),
    Metric("kvstore_master_keys_asked", C, "Keys in requests of clients."),
    Metric("kvstore_master_lookup_misses", C, "Of those looked up: not there."),
    Metric("kvstore_master_events_published", C, "Events of blocks that nodes told."),
    Metric("kvstore_master_commands_failed", C, "Commands that a node did not carry out."),
    Metric("kvstore_master_copies_ordered", C, "Replicas that nodes were told to fetch."),
    Metric("kvstore_master_copies_entered", C, "Replicas that came to be."),
    Metric("kvstore_master_instances", G, "Inference engines that report to the scheduler."),
    Metric("kvstore_master_scheduled", C, "Requests of engines that were given a place."),
    Metric("kvstore_master_schedule_rejections", C, "Requests of engines that were given none, by why.", ("reason",)),
    Metric("kvstore_master_scheduled_transfer_blocks", C, "Blocks that the scheduler had moved to where a request goes."),
)
CLIENT: Final = (
    Metric(
        "kvstore_client_operation_duration_seconds",
        H,
        "Calls of this client. Of get, get_into, put and exists one in 61 is timed, and counts for those between.",
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
)
ROUTER: Final = (
    Metric("kvstore_router_requests", C, "Requests of clients."),
    Metric("kvstore_router_active_requests", G, "Of these, being served."),
    Metric("kvstore_router_completed", C, "Answered to the end."),
    Metric("kvstore_router_rejections", C, "Not taken on, by why.", ("reason",)),
    Metric("kvstore_router_failures", C, "Failed for want of an engine or a master, or by their failure."),
    Metric("kvstore_router_hang_ups", C, "Clients that were gone before the end."),
    Metric("kvstore_router_retries", C, "Requests scheduled again."),
    Metric("kvstore_router_prompt_tokens", C, "Tokens of prompts."),
    Metric("kvstore_router_prefix_tokens", C, "Of these, not computed."),
    Metric("kvstore_router_output_tokens", C, "Tokens of answers."),
)
SIDECAR: Final = (
    Metric("kvstore_sidecar_reporting", G, "1 while the scheduler knows the engine."),
    Metric("kvstore_sidecar_reports", C, "Reports that the master took."),
    Metric("kvstore_sidecar_failures", C, "Metrics of the engine that could not be had, and reports that were not taken."),
)
METRICS: Final = NODE + MASTER + CLIENT + ROUTER + SIDECAR
