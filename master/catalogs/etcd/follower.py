"""Follower of the etcd catalog, in one thread: lists and watches the records, campaigns for the owner's key, and holds
the ownership.

All values are listed as of one revision; later changes are watched. When the owner's key does not exist, every
follower tries to create it, and one succeeds. It is elected once its watch delivers the creation: it has
then seen all writes of former owners."""

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.etcd.channel import EtcdChannel, is_gone
from kvstore.master.catalogs.etcd.lease import EtcdLease, OwnerKey, end_of, lease_with_key, owner_of
from kvstore.master.catalogs.etcd.watch import CompactedError, EtcdWatch, WatchEvents
from kvstore.master.catalogs.etcd.writer import Ownership
from kvstore.master.catalogs.interface import CatalogOwner, Change, Follower, Op
from kvstore.master.catalogs.segments.log import RECORDS, SEGMENTS, SegmentLog
from kvstore.protocol.errors import CatalogUnavailable, Corrupt, StaleEpoch, typed

if TYPE_CHECKING:
    from kvstore.master.catalogs.etcd.catalog import EtcdCatalog

LOG = logging.getLogger("kvstore.master")

PAGE_BYTES: Final = 16 * 1024 * 1024
"""A listing page is bounded by this and MAX_PAGE_KEYS. Large pages pay: for each, etcd 3.4 visits all keys up to the
end of the range. Measured with 300,000 records: 20,000 records/s in pages of 1,000 keys, 136,000 in pages of 10,000."""
MAX_PAGE_KEYS: Final = 100_000
MIN_PAGE_KEYS: Final = 16
"""Size of the first page, whose values may be of 768 KiB each. A failed page is retried with this size: it may have
been too large or slow."""
GRACE_S: Final = 1.0
"""Time that `stop` waits for the follower's call under way."""


class EtcdFollower:
    """Thread that follows one etcd catalog and owns it when elected. `end` and `stop` are thread-safe.

    `health` is None, or the reason that it cannot follow."""

    def __init__(
        self,
        catalog: "EtcdCatalog",
        reading: EtcdChannel,
        leasing: EtcdChannel,
        key: OwnerKey,
        listing: bytes,
        follower: Follower,
    ) -> None:
        """`listing` is the key that keeps etcd's history from compaction (maintenance.py)."""
        self._reading, self._leasing, self._key, self._listing, self._follower = reading, leasing, key, listing, follower
        self._catalog = catalog
        self._shards, self._lease_ttl_s, self._timeout_s = catalog.shards, catalog.timing.lease_ttl_s, catalog.timing.request_timeout_s
        self._stopped = threading.Event()
        self._ended = threading.Event()
        """Set when this master's ownership ends, or the catalog closes."""
        self._end_reason = StaleEpoch("this master does not own the catalog")
        self._lease: EtcdLease | None = None
        self._history: EtcdLease | None = None
        """Lease of the key `listing`, while it exists."""
        self._owner: CatalogOwner | None = None
        self._watch: EtcdWatch | None = None
        self._log = SegmentLog(catalog.shards)
        self.health: str | None = None
        self._thread = threading.Thread(target=self._run, name="catalog-follow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, why: StaleEpoch) -> None:
        """End the ownership of this master."""
        self._end_reason = why
        self._ended.set()

    def stop(self) -> None:
        """Give up the ownership, if held, and notify the follower no more."""
        self._stopped.set()
        self._ended.set()
        if self._watch is not None:
            self._watch.cancel()
        self._thread.join(GRACE_S)
        self._give_up()
        self._release_history()

    def _run(self) -> None:
        backoff = self._catalog.backoff()
        while not self._stopped.is_set():
            try:
                self._give_up()  # no watch reports a key that was created before the listing: it would be held for ever without an election
                revision = self._list()
                self._note(None)
                backoff.reset()
                self._follow(revision)
            except CompactedError as error:  # a long listing fails again and again unless its history is kept
                self._note(str(error))
                self._keep_history()
                continue
            except Exception as error:
                if self._stopped.is_set():
                    return
                self._note(str(typed(error)))
                if isinstance(error, Corrupt):
                    self._follower.deposed(error)
                self._stopped.wait(backoff.next_s())
            self._release_history()

    def _keep_history(self) -> None:
        """Keep etcd's history from now on, if etcd accepts the key. A full etcd does not, and is listed all the
        same."""
        self._release_history()
        with contextlib.suppress(Exception):
            self._history = lease_with_key(self._leasing, self._listing, b"", ttl_s=self._lease_ttl_s, timeout_s=self._timeout_s)

    def _release_history(self) -> None:
        lease, self._history = self._history, None
        if lease is not None:
            lease.close()

    def _list(self) -> int:
        """Pass all values as of one revision to the follower, and return the revision. Raises CatalogUnavailable,
        CompactedError, Corrupt."""
        prefix = self._key.prefix
        page = rpc_pb2.RangeRequest(key=prefix, range_end=end_of(prefix), limit=MIN_PAGE_KEYS)
        self._owner, self._log = None, SegmentLog(self._shards)
        backoff = self._catalog.backoff()
        while True:
            try:
                reply = self._reading.call("Range", page, timeout_s=self._timeout_s)
            except CatalogUnavailable as error:
                if is_gone(error):
                    raise CompactedError(str(error)) from error
                if not page.revision or self._stopped.is_set():
                    raise
                page.limit = MIN_PAGE_KEYS
                self._note(str(error))
                self._stopped.wait(backoff.next_s())
                continue
            if not page.revision:
                page.revision = reply.header.revision
                self._follower.begin()
            for value in reply.kvs:
                self._listed(value)
            if not reply.more:
                self._follower.owned_by(self._owner)
                return int(page.revision)
            page.key = reply.kvs[-1].key + b"\x00"
            page.limit = max(MIN_PAGE_KEYS, min(MAX_PAGE_KEYS, len(reply.kvs) * PAGE_BYTES // reply.ByteSize()))

    def _listed(self, value: Any) -> None:
        key = value.key.removeprefix(self._key.prefix)
        if key.startswith(SEGMENTS):
            self._take(self._log.first_read(key, value.value))
        elif key.startswith(RECORDS):
            self._take([Op(key.removeprefix(RECORDS), value.value)])
        elif value.key == self._key.key:
            self._owned(value)

    def _follow(self, revision: int) -> None:
        """Pass on changes after `revision` until this master has been elected and deposed. Raises CompactedError,
        Corrupt."""
        backoff = self._catalog.backoff()
        while not self._stopped.is_set():
            try:
                if self._owner is None and self._lease is None:
                    self._campaign()
                self._watch = EtcdWatch(self._reading, self._key.prefix, end_of(self._key.prefix), timeout_s=self._timeout_s)
                for events in self._watch.events(revision + 1):
                    self._note(None)
                    backoff.reset()
                    if not events.events:
                        self._release_history()  # the watch has caught up
                    if (ownership := self._apply_events(events)) is not None:
                        self._watch.cancel()
                        self._own(ownership)
                        return
                    if events.is_whole:
                        revision = events.revision
                    if self._owner is None and self._lease is None:
                        self._campaign()
            except CatalogUnavailable as error:
                if not self._stopped.is_set():
                    self._note(str(error))
                    self._stopped.wait(backoff.next_s())

    def _apply_events(self, events: WatchEvents) -> Ownership | None:
        """Pass the events to the follower; return the ownership if they elect this master."""
        before, elected = self._owner, None
        for event in events.events:
            key, deleted = event.kv.key.removeprefix(self._key.prefix), event.type == event.DELETE
            if event.kv.key == self._key.key:
                if deleted:
                    self._owner = None
                else:
                    self._owned(event.kv)
                    if self._lease is not None and event.kv.lease == self._lease.lease_id:
                        elected = Ownership(self._lease, int(event.kv.create_revision), int(event.kv.mod_revision), self._log)
            elif key.startswith(SEGMENTS):
                if deleted:
                    self._log.removed(key)
                else:
                    self._take(self._log.read(key, event.kv.value))
            elif key.startswith(RECORDS):
                self._take([Op(key.removeprefix(RECORDS), None if deleted else event.kv.value)])
        if elected is not None:
            return elected
        if self._lease is not None and not self._lease.is_valid:
            self._lease = None
        if self._owner != before:
            self._follower.owned_by(self._owner)
        return None

    def _take(self, changes: Sequence[Change]) -> None:
        if changes:
            self._follower.take(changes)

    def _owned(self, value: Any) -> None:
        """Read the owner's key."""
        self._owner = owner_of(value)

    def _campaign(self) -> None:
        """Try to create the owner's key. The watch shows if this master became the owner."""
        wait_s = self._catalog.wait_s()
        if wait_s and self._stopped.wait(wait_s):
            return
        self._ended.clear()
        if self._stopped.is_set():
            self._ended.set()  # `stop` may have set it just before
        lease = self._lease = EtcdLease(self._leasing, self._lease_ttl_s, on_lost=self.end)
        request = rpc_pb2.TxnRequest()
        request.compare.add(result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.CREATE, key=self._key.key, create_revision=0)
        put = request.success.add().request_put
        put.key, put.value, put.lease = self._key.key, self._key.value, lease.lease_id
        try:
            won = self._reading.call("Txn", request, timeout_s=self._timeout_s).succeeded
        except BaseException:
            self._give_up()
            raise
        if not won:
            self._give_up()

    def _give_up(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    def _own(self, ownership: Ownership) -> None:
        """Hold the ownership until it ends."""
        if not self._ended.is_set():
            LOG.info("catalog: this master owns it, in epoch %d", ownership.epoch)
            self._catalog.admit(ownership)
            self._follower.elected(ownership.epoch)
            self._release_history()
            self._ended.wait()
            if self._stopped.is_set():
                return
            self._catalog.refuse(self._end_reason)
            LOG.warning("catalog: this master owns it no longer: %s", self._end_reason)
            self._follower.deposed(self._end_reason)
        self._give_up()

    def _note(self, problem: str | None) -> None:
        """Set `health`; log only the change from None."""
        before, self.health = self.health, problem
        if problem is not None and before is None:
            LOG.warning("catalog: %s", problem)
