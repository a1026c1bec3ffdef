"""Following the catalog in etcd, standing for election, and owning it: one thread's work.

All values are read as of a revision, and what comes after it is watched. When nobody has the owner's key, all that follow try to create it,
and one does. It is elected once its watch has brought that very creation: all that any owner wrote came before.
"""

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.etcd.channel import EtcdChannel, is_gone
from kvstore.master.catalogs.etcd.lease import EtcdLease, OwnerKey, end_of, owner_of, with_key
from kvstore.master.catalogs.etcd.watch import CompactedError, EtcdWatch, WatchEvents
from kvstore.master.catalogs.etcd.writer import Ownership
from kvstore.master.catalogs.interface import CatalogOwner, Change, Follower, Op
from kvstore.master.catalogs.segments.log import RECORDS, SEGMENTS, SegmentLog
from kvstore.protocol.errors import CatalogUnavailable, Corrupt, StaleEpoch, typed

if TYPE_CHECKING:
    from kvstore.master.catalogs.etcd.catalog import EtcdCatalog

LOG = logging.getLogger("kvstore.master")

PAGE_BYTES: Final = 16 * 1024 * 1024
"""Pages of a listing are as large as this and MAX_PAGE_KEYS let them: for each page etcd 3.4 visits all keys up to the end of the range.
Measured with 300,000 records: 20,000 records/s in pages of 1,000 keys, 136,000 in pages of 10,000."""
MAX_PAGE_KEYS: Final = 100_000
MIN_PAGE_KEYS: Final = 16
"""The first page's: its values may be of 768 KiB each. A page that fails shrinks to this, lest it was too large or too slow."""
GRACE_S: Final = 1.0
"""How long `stop` waits for a call of the follower that is under way."""


class EtcdFollower:
    """`run` is the thread's; `end` and `stop` may be called from any. `health`: None, or what keeps it from following."""

    def __init__(
        self,
        catalog: "EtcdCatalog",
        reading: EtcdChannel,
        leasing: EtcdChannel,
        key: OwnerKey,
        listing: bytes,
        follower: Follower,
    ) -> None:
        """`listing` is the key that has etcd's history kept (maintenance.py)."""
        self._reading, self._leasing, self._key, self._listing, self._follower = reading, leasing, key, listing, follower
        self._catalog = catalog
        self._shards, self._lease_ttl_s, self._timeout_s = catalog.shards, catalog.timing.lease_ttl_s, catalog.timing.request_timeout_s
        self._stopped = threading.Event()
        self._over = threading.Event()
        """This master's ownership is over, or the catalog is being closed."""
        self._why_over = StaleEpoch("this master does not own the catalog")
        self._lease: EtcdLease | None = None
        self._history: EtcdLease | None = None
        """Of the key `listing`, while that is there."""
        self._owner: CatalogOwner | None = None
        self._watch: EtcdWatch | None = None
        self._log = SegmentLog(catalog.shards)
        self.health: str | None = None
        self._thread = threading.Thread(target=self._run, name="catalog-follow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, why: StaleEpoch) -> None:
        """This master owns the catalog no longer."""
        self._why_over = why
        self._over.set()

    def stop(self) -> None:
        """Give the ownership up, if this master has it, and tell the follower nothing any more."""
        self._stopped.set()
        self._over.set()
        if self._watch is not None:
            self._watch.cancel()
        self._thread.join(GRACE_S)
        self._give_up()
        self._let_history_go()

    def _run(self) -> None:
        backoff = self._catalog.backoff()
        while not self._stopped.is_set():
            try:
                self._give_up()  # what created the key before a listing, no watch tells of: it would be held, and nobody elected, for ever
                revision = self._list()
                self._note(None)
                backoff.reset()
                self._follow(revision)
            except CompactedError as error:  # a listing that takes long meets it again and again, unless history is kept for it
                self._note(str(error))
                self._have_history_kept()
                continue
            except Exception as error:
                if self._stopped.is_set():
                    return
                self._note(str(typed(error)))
                if isinstance(error, Corrupt):
                    self._follower.deposed(error)
                self._stopped.wait(backoff.next_s())
            self._let_history_go()

    def _have_history_kept(self) -> None:
        """From now on, as far as etcd takes that: one that is full takes no key, and is listed all the same."""
        self._let_history_go()
        with contextlib.suppress(Exception):
            self._history = with_key(self._leasing, self._listing, b"", ttl_s=self._lease_ttl_s, timeout_s=self._timeout_s)

    def _let_history_go(self) -> None:
        lease, self._history = self._history, None
        if lease is not None:
            lease.close()

    def _list(self) -> int:
        """Give the follower all values as of a revision, which is returned. Raises CatalogUnavailable, CompactedError, Corrupt."""
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
        """Tell of what came after `revision` until this master was elected and deposed again. Raises CompactedError, Corrupt."""
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
                        self._let_history_go()  # etcd has told all that it was needed for
                    if (ownership := self._happened(events)) is not None:
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

    def _happened(self, events: WatchEvents) -> Ownership | None:
        """Tell of the events; this master's ownership, if they elect it."""
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
        """The owner's key, as it is now."""
        self._owner = owner_of(value)

    def _campaign(self) -> None:
        """Create the owner's key if there is none. Whether that made this master the owner, its watch will tell."""
        wait_s = self._catalog.wait_s()
        if wait_s and self._stopped.wait(wait_s):
            return
        self._over.clear()
        if self._stopped.is_set():
            self._over.set()  # `stop` may have done so just before
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
        """From the election to its end."""
        if not self._over.is_set():
            LOG.info("catalog: this master owns it, in epoch %d", ownership.epoch)
            self._catalog.admit(ownership)
            self._follower.elected(ownership.epoch)
            self._let_history_go()
            self._over.wait()
            if self._stopped.is_set():
                return
            self._catalog.refuse(self._why_over)
            LOG.warning("catalog: this master owns it no longer: %s", self._why_over)
            self._follower.deposed(self._why_over)
        self._give_up()

    def _note(self, trouble: str | None) -> None:
        """Keep what `health` tells; an operator's log gets the changes only."""
        before, self.health = self.health, trouble
        if trouble is not None and before is None:
            LOG.warning("catalog: %s", trouble)
