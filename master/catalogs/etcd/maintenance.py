"""Maintenance of etcd: the owner compacts its history, and size, quorum and alarms are reported before etcd stops.

etcd keeps every version of every key until its history is compacted. It refuses writes (alarm NOSPACE) when its
database reaches its quota, which its API does not report. Compaction frees space within the database for reuse. Only
a defragmentation, which an operator runs since it stops a member for seconds, shrinks the file."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.etcd.channel import EtcdChannel, is_gone
from kvstore.master.catalogs.etcd.lease import end_of
from kvstore.master.catalogs.etcd.quorum import EtcdQuorum
from kvstore.protocol.errors import KVStoreError, typed
from kvstore.protocol.settings import format_size

LOG = logging.getLogger("kvstore.master")

CHECK_INTERVAL_S: Final = 2.0
"""Interval of status checks; the compaction interval, if that is shorter."""
COMPACTION_SHARE: Final = 0.5
"""Share of the quota in use from which history is compacted at each check, up to the revision of the check before.
Commits at full speed could fill a quota of 2 GiB within two intervals of a minute.

Revisions that a master is listing (follower.py) are kept even then, up to `warning_share`: a listing of twenty
million blocks, half a quota of 2 GiB, takes longer than an interval."""
NO_SPACE: Final = (
    "etcd is full (alarm NOSPACE) and takes no writes: compact its history, defragment each member, then disarm the alarm "
    "(etcdctl compact REVISION; etcdctl defrag --cluster; etcdctl alarm disarm), or raise --quota-backend-bytes"
)
CORRUPT: Final = "etcd found its members' data to differ (alarm CORRUPT): restore it from a snapshot, or replace the member that differs"


@dataclass(frozen=True, slots=True)
class MaintenanceLimits:
    """Seconds of history kept (0: never compacted), the quota etcd was started with, and the share of it that
    `health` warns from."""

    compact_interval_s: float = 60.0
    quota_bytes: int = 2 << 30
    warning_share: float = 0.8


class EtcdMaintenance:
    """Thread that checks and compacts etcd. Not thread-safe but for its attributes, which any thread reads.

    `health` is None, or one line about what is wrong. `outage` is `quorum`'s sentence while etcd serves no requests,
    else ""."""

    def __init__(
        self,
        channel: EtcdChannel,
        quorum: EtcdQuorum,
        bounds: MaintenanceLimits,
        listings: bytes,
        *,
        is_owner: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        """Keys below `listings` belong to masters that are listing; each was written at a revision from which
        history is needed."""
        self._channel = channel
        self._quorum = quorum
        self._bounds = bounds
        self._listings = listings
        self._is_owner = is_owner
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._compact_at_s = time.monotonic() + bounds.compact_interval_s
        self._compact_to = 0
        """Newest revision at the last compaction."""
        self._seen = 0
        """Newest revision at the last check."""
        self.health: str | None = None
        self.outage = ""
        self.size_bytes = 0
        """Size of etcd's database at the last check."""
        self._thread = threading.Thread(target=self._run, name="catalog-keep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread soon; a call under way ends with its channel."""
        self._stopped.set()

    def _run(self) -> None:
        interval_s = min(CHECK_INTERVAL_S, self._bounds.compact_interval_s or CHECK_INTERVAL_S)
        while True:
            try:
                self._check()
            except Exception as error:  # also gRPC's, when a thread cannot be started
                self._note(self._outage() or str(typed(error)))
            if self._stopped.wait(interval_s):
                return

    def _outage(self) -> str:
        try:
            self.outage = self._quorum.outage()
        except Exception as error:  # as above
            LOG.debug("etcd's members were not asked: %s", error)
        return self.outage

    def _check(self) -> None:
        status = self._channel.call("Status", rpc_pb2.StatusRequest(), timeout_s=self._timeout_s)
        self.size_bytes = int(status.dbSize)
        self.outage = ""
        if not status.leader and self._outage():
            self._note(self.outage)
            return
        alarms = self._channel.call("Alarm", rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET), timeout_s=self._timeout_s).alarms
        self._note(problem_of(status, {alarm.alarm for alarm in alarms}, self._bounds))
        revision, seen = int(status.header.revision), self._seen
        self._seen = revision
        if not self._bounds.compact_interval_s:
            return
        share = status.dbSizeInUse / self._bounds.quota_bytes
        keeps_listings = share < self._bounds.warning_share
        if time.monotonic() >= self._compact_at_s:
            self._compact_at_s = time.monotonic() + self._bounds.compact_interval_s
            up_to, self._compact_to = self._compact_to, revision
            self._compact(up_to, keeps_listings=keeps_listings)
        if share >= COMPACTION_SHARE:
            self._compact(seen, keeps_listings=keeps_listings)

    def _compact(self, up_to: int, *, keeps_listings: bool) -> None:
        if up_to and self._is_owner():
            if keeps_listings:
                request = rpc_pb2.RangeRequest(key=self._listings, range_end=end_of(self._listings), keys_only=True)
                found = self._channel.call("Range", request, timeout_s=self._timeout_s).kvs
                up_to = min([up_to, *(listing.mod_revision for listing in found)])
            try:
                self._channel.call("Compact", rpc_pb2.CompactionRequest(revision=up_to), timeout_s=self._timeout_s)
            except KVStoreError as error:
                if not is_gone(error):  # else another client has compacted further
                    raise

    def _note(self, problem: str | None) -> None:
        """Set `health`; log only the change from None, since sizes change all the time."""
        before, self.health = self.health, problem
        if problem is not None and before is None:
            LOG.warning("catalog: %s", problem)


def problem_of(status: Any, alarms: set[int], bounds: MaintenanceLimits) -> str | None:
    """Return the worst problem of an etcd with this status, or None."""
    if rpc_pb2.AlarmType.Value("CORRUPT") in alarms:
        return CORRUPT
    if rpc_pb2.AlarmType.Value("NOSPACE") in alarms:
        return NO_SPACE
    if not status.leader:
        return "etcd has no leader: too few of its members reach one another"
    if status.dbSize >= bounds.warning_share * bounds.quota_bytes:
        return (
            f"etcd's database has {format_size(status.dbSize)} of a quota of {format_size(bounds.quota_bytes)}, "
            f"{format_size(status.dbSizeInUse)} of it in use: defragment its members if that is much less, else raise the quota"
        )
    return None
