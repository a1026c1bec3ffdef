"""The catalog `etcd://...`: records in etcd, written by group commit and fenced by the owner's key.

Each partition has a PREFIX: the operator's for the first, the operator's with ".N" behind it for others, which is
outside of the range that followers of the first one watch.

    PREFIX/owner      the owner (lease.py), under its lease
    PREFIX/identity   random id of this catalog; written once
    PREFIX/format     {"version": 1, "shards": ..., "partitions": ...}; written once
    PREFIX/s/...      segments of blocks (segments/log.py)
    PREFIX/r/KEY      a small record; KEY is its raw bytes

Under the operator's prefix, for all partitions:

    PREFIX.listing/PARTITION/ADDRESS    a master is listing: history from this key's revision on is not compacted"""

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.etcd.channel import EtcdAccess, EtcdChannel
from kvstore.master.catalogs.etcd.follower import EtcdFollower
from kvstore.master.catalogs.etcd.lease import OwnerKey
from kvstore.master.catalogs.etcd.maintenance import EtcdMaintenance, MaintenanceLimits
from kvstore.master.catalogs.etcd.members import EtcdMembers
from kvstore.master.catalogs.etcd.quorum import EtcdQuorum, warn_of_data_bug
from kvstore.master.catalogs.etcd.writer import EtcdWriter, Ownership
from kvstore.master.catalogs.group_commit import Backoff, GroupCommit
from kvstore.master.catalogs.interface import (
    IDENTITY_BYTES,
    NO_PEERS,
    Candidate,
    Catalog,
    Change,
    CommitStats,
    Done,
    Follower,
    PeerMaster,
    check_partitions,
)
from kvstore.master.catalogs.segments.merger import SegmentMerger
from kvstore.protocol.errors import CatalogUnavailable, ConfigError, StaleEpoch
from kvstore.protocol.partitions import SHARDS

LEASE_TTL_S: Final = 2.0
FORMAT: Final = 1
"""Layout of the keys and values under a prefix. A catalog of another format is refused."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EtcdTiming:
    """Lease, request timeout and retry limit, in seconds. An owner whose lease is not renewed for `lease_ttl_s` may
    be replaced; etcd's minimum is 2."""

    lease_ttl_s: float = LEASE_TTL_S
    request_timeout_s: float = 5.0
    longest_backoff_s: float = 2.0


class EtcdCatalog(Catalog):
    """A catalog in etcd. Threads: one commits, one follows, one renews the lease, one does maintenance, two keep the
    membership."""

    scheme: ClassVar[str] = "etcd"

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str = "/kvstore",
        partition: int = 0,
        partitions: int = 1,
        access: EtcdAccess = EtcdAccess(),  # noqa: B008 - frozen
        timing: EtcdTiming = EtcdTiming(),  # noqa: B008 - frozen
        bounds: MaintenanceLimits = MaintenanceLimits(),  # noqa: B008 - frozen
    ) -> None:
        """`endpoints` are `host:port`. The first partition's catalog also does etcd's maintenance and membership for
        all partitions.

        Raises ConfigError when a file of `access` cannot be read."""
        # A channel a purpose: a failed call drops its connection, and must not drop the others'.
        self._writing, self._reading, self._leasing = (EtcdChannel(endpoints, access) for _purpose in range(3))
        maintenance_channel = EtcdChannel(endpoints, access)
        self._channels = (self._writing, self._reading, self._leasing, maintenance_channel)
        self._listing = f"{prefix}.listing/{partition}/".encode()
        is_owner, listings = (lambda: self._committer.is_admitted), f"{prefix}.listing/".encode()
        self._quorum = EtcdQuorum(endpoints, access)
        self._maintenance = EtcdMaintenance(
            maintenance_channel, self._quorum, bounds, listings, is_owner=is_owner, timeout_s=timing.request_timeout_s
        )
        self._prefix = f"{prefix}.{partition}/".encode() if partition else f"{prefix}/".encode()
        self._partitions = partitions
        self._is_first = not partition
        self._members: EtcdMembers | None = None
        self.timing = timing
        self._identity = ""
        self._shards = SHARDS
        self._key = OwnerKey(self._prefix, Candidate("", ""))
        self._closing = threading.Event()
        self._following: EtcdFollower | None = None
        self._committer: GroupCommit[Ownership] = GroupCommit(
            self._write, backoff=self.backoff(), interrupt=self._writing.close, on_stale=self._end, background=self._merge
        )

    def open(self, *, deadline_s: float) -> None:
        """See Catalog. Warns in the log when the server's version is known to lose or corrupt data."""
        try:
            self._open(deadline_s)
        except CatalogUnavailable as error:
            lack = self._quorum.outage().partition(";")[0]
            advice = "check that etcd runs and that --catalog names its client ports"
            raise CatalogUnavailable(f"{lack}: {advice}" if lack else str(error)) from error
        self._committer.start()

    def _open(self, deadline_s: float) -> None:
        status = self._retry(lambda timeout_s: self._reading.call("Status", rpc_pb2.StatusRequest(), timeout_s=timeout_s), deadline_s)
        warn_of_data_bug(status.version)
        identity = self._retry(lambda timeout_s: self._agreed(b"identity", secrets.token_hex(IDENTITY_BYTES), timeout_s), deadline_s)
        form = json.dumps(_form(self._partitions))
        self._shards = _shards(self._retry(lambda timeout_s: self._agreed(b"format", form, timeout_s), deadline_s), self._partitions)
        self._identity = identity.decode()

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def shards(self) -> int:
        return self._shards

    def follow(self, me: Candidate, follower: Follower) -> None:
        self._key = OwnerKey(self._prefix, me)
        listing = self._listing + me.address.encode()
        self._following = EtcdFollower(self, self._reading, self._leasing, self._key, listing, follower)
        if self._is_first:
            self._members = EtcdMembers(
                self._channels[-1],
                self._prefix[:-1].decode(),
                me,
                self.contact,
                lease_ttl_s=self.timing.lease_ttl_s,
                timeout_s=self.timing.request_timeout_s,
            )
            self._members.start()
        self._following.start()
        if self._is_first:
            self._maintenance.start()

    @property
    def live_masters(self) -> frozenset[str]:
        return self._members.live_masters if self._members is not None and self._partitions > 1 else frozenset()

    @property
    def peer_masters(self) -> Mapping[str, PeerMaster]:
        return self._members.peer_masters if self._members is not None else NO_PEERS

    def admit(self, ownership: Ownership) -> None:
        """Write commits from now on: this master owns the catalog."""
        self._committer.admit(ownership)

    def refuse(self, why: StaleEpoch) -> None:
        """Fail commits from now on: this master no longer owns the catalog."""
        self._committer.refuse(why)

    def give_up(self) -> None:
        self._end(StaleEpoch("it is given up for another master"))

    def commit(self, changes: Sequence[Change], done: Done) -> None:
        self._committer.submit(changes, done)

    @property
    def outage(self) -> str:
        return self._maintenance.outage

    @property
    def health(self) -> str:
        if self._maintenance.outage:
            return self._maintenance.outage  # the cause of the parts' own errors
        writing = self._committer.health
        found = (
            self._following.health if self._following is not None else None,
            None if writing == "ok" else writing,
            self._maintenance.health,
            self._members.health if self._members is not None else None,
        )
        return "; ".join(dict.fromkeys(problem for problem in found if problem)) or "ok"

    @property
    def written(self) -> CommitStats:
        return self._committer.written(self._maintenance.size_bytes)

    def close(self) -> None:
        self._closing.set()
        self._committer.close()
        if self._members is not None:
            self._members.stop()
        if self._following is not None:
            self._following.stop()
        if self._is_first:
            self._maintenance.stop()
        for channel in self._channels:
            channel.close()
        self._quorum.close()

    def _write(self, changes: Sequence[Change], owned: Ownership) -> None:
        """Try once to write a group. Runs in the committer's thread, as `_merge` does."""
        self._writer(owned).write(owned.log.append(changes))

    def _merge(self, owned: Ownership) -> bool:
        """Do one merge step; return True if more is to be merged."""
        if owned.merging is None:
            owned.merging = SegmentMerger(owned.log, self._writer(owned))
        return owned.merging.step()

    def _writer(self, owned: Ownership) -> EtcdWriter:
        return EtcdWriter(self._writing, self._key, owned, timeout_s=self.timing.request_timeout_s)

    def _end(self, why: StaleEpoch) -> None:
        if self._following is not None:
            self._following.end(why)

    def _agreed(self, name: bytes, proposal: str, timeout_s: float) -> bytes:
        """Return the value of a key, written now if it is absent. Of concurrent writers one succeeds, and all read
        its value."""
        key = self._prefix + name
        request = rpc_pb2.TxnRequest()
        request.compare.add(result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.MOD, key=key, mod_revision=0)
        put = request.success.add().request_put
        put.key, put.value = key, proposal.encode()
        request.failure.add().request_range.key = key
        reply = self._reading.call("Txn", request, timeout_s=timeout_s)
        found: bytes = put.value if reply.succeeded else reply.responses[0].response_range.kvs[0].value
        return found

    def _retry(self, attempt: Callable[[float], T], retry_s: float) -> T:
        """Retry `attempt(timeout_s)` with back-off until it succeeds or `retry_s` is over, then raise its last
        error. Errors that a retry does not mend are raised at once."""
        give_up_at_s = time.monotonic() + retry_s
        backoff = self.backoff()
        while True:
            left_s = give_up_at_s - time.monotonic()
            try:
                return attempt(min(self.timing.request_timeout_s, max(left_s, 0.001)))
            except CatalogUnavailable:
                delay_s = backoff.next_s()
                if delay_s >= give_up_at_s - time.monotonic() or self._closing.wait(delay_s):
                    raise

    def backoff(self) -> Backoff:
        return Backoff(first_s=0.05, longest_s=self.timing.longest_backoff_s)


def _form(partitions: int) -> dict[str, int]:
    return {"version": FORMAT, "shards": SHARDS, "partitions": partitions}


def _shards(form: bytes, partitions: int) -> int:
    """Return the number of shards. Raises ConfigError for a catalog of another release or number of partitions."""
    try:
        fields: Any = json.loads(form)
        version, shards, made_of = fields["version"], fields["shards"], fields["partitions"]
    except (ValueError, TypeError, KeyError, AttributeError):
        version, shards, made_of = form, 0, 0
    if version != FORMAT or not isinstance(shards, int) or not 0 < shards <= 1 << 16:
        raise ConfigError(f"etcd: the catalog is of another release of kvstore (form {version!r}, this one reads {FORMAT})")
    check_partitions("etcd", made_of, partitions)
    return shards
