"""Metrics of a master. The loop is the only caller, but for `control`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvstore.master.catalogs.interface import CommitStats
from kvstore.master.directory.placement.home_copies import SKIPPED
from kvstore.master.leadership.leader import LeaderRole
from kvstore.protocol.version import VERSION
from kvstore.telemetry.metrics.histogram import Histograms, sum_of
from kvstore.telemetry.metrics.metric import Reading, Readings
from kvstore.telemetry.metrics.requests import RequestMetrics

REJECTED = "rejected_"
"""Prefix of the scheduler's counters of rejections; a reason follows."""


class LifetimeCounters:
    """Sums of counters over current and ended ownerships, so that the sums never decrease."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()
        self._counted: dict[int, Mapping[str, int]] = {}
        """Counters of the last call, by their id."""

    def of(self, owned: Iterable[Mapping[str, int]]) -> Counter[str]:
        """Return the sum of the current counters, which must be the same objects in each call, and of all former
        ones."""
        now = {id(counters): counters for counters in owned}
        for ended in self._counted.keys() - now.keys():
            self._ended.update(self._counted[ended])
        self._counted = now
        total = Counter(self._ended)
        for counters in now.values():
            total.update(counters)
        return total


class MasterMetrics:
    """Counters and readings of a master. `requests` is the server's observer; the control plane's threads write
    `control`."""

    def __init__(self) -> None:
        self.requests = RequestMetrics()
        self.control = Histograms()
        self.takeovers = 0
        self._frames, self._scheduling = LifetimeCounters(), LifetimeCounters()

    def read(
        self,
        name: str,
        written: Sequence[CommitStats],  # by partition
        *,
        epoch: int,
        is_ready: bool,
        is_healthy: bool,
        connections: int,
        records: int,
        trace_spans: Reading,
    ) -> dict[str, Reading]:
        """Return the readings of any master."""
        return {
            "kvstore_master_info": {(name, VERSION): 1},
            "kvstore_master_ready": int(is_ready),
            "kvstore_master_owner": 0,
            "kvstore_master_partitions": len(written),
            "kvstore_master_partitions_owned": 0,
            "kvstore_master_epoch": epoch,
            "kvstore_master_takeovers": self.takeovers,
            "kvstore_master_trace_spans": trace_spans,
            "kvstore_master_request_duration_seconds": self.requests.durations(),
            "kvstore_master_requests_refused": self.requests.refusals(),
            "kvstore_master_control_duration_seconds": self.control.read(),
            "kvstore_master_connections": connections,
            "kvstore_master_catalog_healthy": int(is_healthy),
            "kvstore_master_catalog_commit_duration_seconds": {(): sum_of(one.durations for one in written)},
            "kvstore_master_catalog_queue": sum(one.waiting for one in written),
            "kvstore_master_catalog_size_bytes": sum(one.size_bytes for one in written),
            "kvstore_master_catalog_records": records,
        }

    def of_owner(self, owned: Sequence[LeaderRole]) -> Readings:
        """Return the readings that only owners have, over the partitions that this master owns, at least one."""
        counters = self._frames.of(leader.frames.counters for leader in owned)
        scheduled = self._scheduling.of(leader.scheduling.counters for leader in owned)
        counts = [leader.directory.counts() for leader in owned]
        members, refused = owned[0].directory.members, owned[0].frames.loads.refused()  # the same in all partitions
        states = Counter(member.state for member in members)
        return {
            "kvstore_master_owner": 1,
            "kvstore_master_partitions_owned": len(owned),
            "kvstore_master_nodes": {(state,): states[state] for state in ("syncing", "alive", "stopped", "dead")},
            "kvstore_master_drained_nodes": sum(1 for member in members if member.drain),
            "kvstore_master_blocks": sum(one.blocks for one in counts),
            "kvstore_master_reservations": sum(one.reserved for one in counts),
            "kvstore_master_pinned_blocks": sum(one.pinned for one in counts),
            "kvstore_master_quota_refused": {(reason,): count for reason, count in refused.items()},
            "kvstore_master_keys_asked": counters["keys"],
            "kvstore_master_lookup_misses": counters["lookup_misses"],
            "kvstore_master_events_published": counters["published"],
            "kvstore_master_blocks_compared": counters["compared"],
            "kvstore_master_commands_failed": counters["commands_failed"],
            "kvstore_master_copies_requested": counters["copies_ordered"],
            "kvstore_master_copies_completed": counters["copies_entered"],
            "kvstore_master_home_copies": counters["home_copies"],
            "kvstore_master_home_copied_bytes": counters["home_copied_bytes"],
            "kvstore_master_home_copies_skipped": {(reason,): counters[f"home_copies_skipped_{reason}"] for reason in SKIPPED},
            "kvstore_master_reuse_reports": counters["reuse_reports"],
            "kvstore_master_reuse_refused": counters["reuse_refused"],
            "kvstore_master_hot_copies": counters["hot_copies"],
            "kvstore_master_hot_copied_bytes": counters["hot_copied_bytes"],
            "kvstore_master_hot_blocks": sum(leader.frames.counters["hot_blocks"] for leader in owned),
            "kvstore_master_instances": len(owned[0].scheduling.instances.each()),
            "kvstore_master_scheduled": scheduled["scheduled"],
            "kvstore_master_schedule_rejections": {
                (name.removeprefix(REJECTED),): count for name, count in scheduled.items() if name.startswith(REJECTED)
            },
            "kvstore_master_scheduled_transfer_blocks": scheduled["transfer_blocks"],
            "kvstore_master_scheduled_promoted_blocks": scheduled["promoted_blocks"],
        }
