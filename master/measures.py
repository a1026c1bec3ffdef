"""What a master measures, and what of it its metrics tell. Its loop is the only caller, but for `control`."""

from collections import Counter

from kvstore.master.catalogs.interface import Written
from kvstore.master.roles.leading import Leading
from kvstore.protocol.version import VERSION
from kvstore.telemetry.metrics.histogram import Histograms
from kvstore.telemetry.metrics.metric import Reading, Readings
from kvstore.telemetry.metrics.requests import Requests

REJECTED = "rejected_"
"""What the scheduler's counters of rejections begin with; a reason follows."""


class MasterMeasures:
    """See the module. `requests` is the server's observer; threads of the control plane write `control`."""

    def __init__(self) -> None:
        self.requests = Requests()
        self.control = Histograms()
        self.takeovers = 0

    def read(
        self,
        name: str,
        written: Written,
        *,
        epoch: int,
        is_ready: bool,
        is_healthy: bool,
        connections: int,
        records: int,
        trace_spans: Reading,
    ) -> dict[str, Reading]:
        """Of any master."""
        return {
            "kvstore_master_info": {(name, VERSION): 1},
            "kvstore_master_ready": int(is_ready),
            "kvstore_master_owner": 0,
            "kvstore_master_epoch": epoch,
            "kvstore_master_takeovers": self.takeovers,
            "kvstore_master_trace_spans": trace_spans,
            "kvstore_master_request_duration_seconds": self.requests.durations(),
            "kvstore_master_requests_refused": self.requests.refusals(),
            "kvstore_master_control_duration_seconds": self.control.read(),
            "kvstore_master_connections": connections,
            "kvstore_master_catalog_healthy": int(is_healthy),
            "kvstore_master_catalog_commit_duration_seconds": {(): written.durations},
            "kvstore_master_catalog_queue": written.waiting,
            "kvstore_master_catalog_size_bytes": written.size_bytes,
            "kvstore_master_catalog_records": records,
        }


def of_owner(leading: Leading) -> Readings:
    """What only the catalog's owner knows."""
    members, counts, counters = leading.directory.members, leading.directory.counts(), leading.frames.counters
    states = Counter(member.state for member in members)
    scheduled = leading.scheduling.counters
    return {
        "kvstore_master_owner": 1,
        "kvstore_master_nodes": {(state,): states[state] for state in ("syncing", "alive", "dead")},
        "kvstore_master_drained_nodes": sum(1 for member in members if member.drain),
        "kvstore_master_blocks": counts.blocks,
        "kvstore_master_reservations": counts.reserved,
        "kvstore_master_pinned_blocks": counts.pinned,
        "kvstore_master_quota_refused": {(reason,): count for reason, count in leading.frames.loads.refused().items()},
        "kvstore_master_keys_asked": counters["keys"],
        "kvstore_master_lookup_misses": counters["lookup_misses"],
        "kvstore_master_events_published": counters["published"],
        "kvstore_master_commands_failed": counters["commands_failed"],
        "kvstore_master_copies_ordered": counters["copies_ordered"],
        "kvstore_master_copies_entered": counters["copies_entered"],
        "kvstore_master_spilled_blocks": counters["spilled_blocks"],
        "kvstore_master_spilled_bytes": counters["spilled_bytes"],
        "kvstore_master_hot_copies": counters["hot_copies"],
        "kvstore_master_hot_copied_bytes": counters["hot_copied_bytes"],
        "kvstore_master_hot_blocks": counters["hot_blocks"],
        "kvstore_master_instances": len(leading.scheduling.instances.each()),
        "kvstore_master_scheduled": scheduled["scheduled"],
        "kvstore_master_schedule_rejections": {
            (name.removeprefix(REJECTED),): count for name, count in scheduled.items() if name.startswith(REJECTED)
        },
        "kvstore_master_scheduled_transfer_blocks": scheduled["transfer_blocks"],
    }
