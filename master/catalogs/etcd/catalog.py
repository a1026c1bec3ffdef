"""The catalog `etcd://...`: the directory's records in etcd, one key each, written by group commit and fenced by the owner's key.

    PREFIX/owner      who owns the catalog: {"name": ..., "address": ...} under the owner's lease. Its create revision is the epoch; its
                      mod revision is the fence. Every transaction compares both.
    PREFIX/identity   what tells this catalog from others; written once
    PREFIX/r/KEY      one record; KEY is the catalog key's raw bytes

Every master reads all records as of a revision, and watches what comes after it. When nobody has the owner's key, all that follow try to
create it, and one does. It is elected once its watch has brought that very creation: all that any owner wrote came before.

A transaction that got no answer may still be on its way and land late. So after any failure the owner's key is written again before
anything is retried: the fence moves, and what was sent under the old one no longer matches. What a former owner sent does not match
the new owner's epoch.
"""

import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.backoff import Backoff
from kvstore.master.catalogs.block_records import as_changes, as_records
from kvstore.master.catalogs.etcd.channel import EtcdAccess, EtcdChannel, Reply, is_gone
from kvstore.master.catalogs.etcd.lease import Lease
from kvstore.master.catalogs.etcd.version import warn_of_data_bug
from kvstore.master.catalogs.etcd.watching import CompactedError, Events, Watch
from kvstore.master.catalogs.group_commit import GroupCommit
from kvstore.master.catalogs.interface import IDENTITY_BYTES, Candidate, Catalog, Change, Done, Follower, Owner
from kvstore.protocol.errors import CatalogUnavailable, Corrupt, StaleEpoch

LOG = logging.getLogger("kvstore.master")

MAX_TXN_OPS = 128
"""etcd's default --max-txn-ops. It limits each branch of a transaction; the compare is counted apart."""
MAX_TXN_BYTES = 1024 * 1024
"""Keys and values of one transaction; etcd's default --max-request-bytes is 1.5 MiB with all overhead."""
PAGE_BYTES = 16 * 1024 * 1024
"""Pages of a load are as large as this and MAX_PAGE_KEYS let them: for each page etcd 3.4 visits all keys up to the end of the range.
Measured with 300,000 records: 20,000 records/s in pages of 1,000 keys, 136,000 in pages of 10,000."""
MAX_PAGE_KEYS = 100_000
MIN_PAGE_KEYS = 256
"""The first page's: its values may be of 64 KiB each. A page that fails shrinks to this, lest it was too large or too slow."""
LEASE_TTL_S = 2.0
FOLLOWER_GRACE_S = 1.0
"""How long `close` waits for a call of the follower that is under way."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Ownership:
    """From an election to its end. `fence`: the owner's key's mod revision, None when it must be moved before anything is written."""

    lease: Lease
    epoch: int
    fence: int | None


class EtcdCatalog(Catalog):
    """See Catalog. Writes come from one thread of its own, what the follower is told from another, and a lease has a third."""

    scheme: ClassVar[str] = "etcd"

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str = "/kvstore",
        access: EtcdAccess = EtcdAccess(),  # noqa: B008 - frozen
        lease_ttl_s: float = LEASE_TTL_S,
        in_flight: int = 4,
        request_timeout_s: float = 5.0,
        longest_backoff_s: float = 2.0,
    ) -> None:
        """`endpoints` are `host:port`. `in_flight` transactions of one group are sent at once, each with `request_timeout_s`. An owner that
        etcd has not heard from for `lease_ttl_s` may be replaced; etcd takes no less than 2.

        Raises ConfigError when a file of `access` cannot be read.
        """
        # One for each purpose: what fails for one breaks its connection, and must not break the others'.
        self._writing, self._reading, self._leasing = (EtcdChannel(endpoints, access) for _purpose in range(3))
        self._prefix = prefix.encode() + b"/"
        self._owner_key = self._prefix + b"owner"
        self._identity_key = self._prefix + b"identity"
        self._records = self._prefix + b"r/"
        self._lease_ttl_s = lease_ttl_s
        self._in_flight = in_flight
        self._request_timeout_s = request_timeout_s
        self._longest_backoff_s = longest_backoff_s
        self._identity = ""
        self._me = Candidate("", "")
        self._stopped = threading.Event()
        self._lease: Lease | None = None
        self._over = threading.Event()
        """This master's ownership is over, or the catalog is being closed."""
        self._why_over = StaleEpoch("this master does not own the catalog")
        self._owner: Owner | None = None
        self._watch: Watch | None = None
        self._trouble: str | None = None
        self._committer = GroupCommit(self._write, backoff=self._backoff(), interrupt=self._writing.close, on_stale=self._end)
        self._thread: threading.Thread | None = None

    def open(self, *, deadline_s: float) -> None:
        """See Catalog. Warns in the log when the server's version is known to lose or corrupt data."""
        status = self._patiently(
            lambda timeout_s: self._reading.call("Status", rpc_pb2.StatusRequest(), timeout_s=timeout_s), patience_s=deadline_s
        )
        warn_of_data_bug(status.version)
        self._identity = self._patiently(self._identify, patience_s=deadline_s)
        self._committer.start()

    @property
    def identity(self) -> str:
        return self._identity

    def follow(self, me: Candidate, follower: Follower) -> None:
        self._me = me
        self._thread = threading.Thread(target=self._run, args=(follower,), name="catalog-follow", daemon=True)
        self._thread.start()

    def commit(self, changes: Sequence[Change], done: Done) -> None:
        self._committer.submit(changes, done)

    @property
    def health(self) -> str:
        return self._committer.health if self._trouble is None else self._trouble

    def close(self) -> None:
        self._committer.close()
        self._stopped.set()
        self._over.set()
        if self._watch is not None:
            self._watch.cancel()
        if self._thread is not None:
            self._thread.join(FOLLOWER_GRACE_S)
        if self._lease is not None:
            self._lease.close()
        for channel in (self._writing, self._reading, self._leasing):
            channel.close()

    # Following: in a thread of its own.

    def _run(self, follower: Follower) -> None:
        backoff = self._backoff()
        while not self._stopped.is_set():
            try:
                revision = self._list(follower)
                self._note(None)
                backoff.reset()
                self._follow(follower, revision)
            except CompactedError:
                continue
            except Exception as error:
                if self._stopped.is_set():
                    return
                self._note(str(error))
                if isinstance(error, Corrupt):
                    follower.deposed(error)
                self._stopped.wait(backoff.next_s())

    def _list(self, follower: Follower) -> int:
        """Give the follower all records as of a revision, which is returned."""
        follower_begun, page = False, self._page(MIN_PAGE_KEYS)
        self._owner = None
        while True:
            reply = self._patiently(lambda timeout_s: self._read_page(page, timeout_s), patience_s=self._request_timeout_s)
            if not follower_begun:
                follower_begun, page.revision = True, reply.header.revision
                follower.begin()
            self._give(follower, ((record.key, record.value) for record in reply.kvs))
            for record in reply.kvs:
                if record.key == self._owner_key:
                    self._owned(record)
            if not reply.more:
                follower.owned_by(self._owner)
                return int(page.revision)
            page.key = reply.kvs[-1].key + b"\x00"
            page.limit = max(MIN_PAGE_KEYS, min(MAX_PAGE_KEYS, len(reply.kvs) * PAGE_BYTES // reply.ByteSize()))

    def _page(self, limit: int) -> Any:
        return rpc_pb2.RangeRequest(key=self._prefix, range_end=_end_of(self._prefix), limit=limit)

    def _read_page(self, page: Any, timeout_s: float) -> Any:
        try:
            return self._reading.call("Range", page, timeout_s=timeout_s)
        except CatalogUnavailable as error:
            page.limit = MIN_PAGE_KEYS
            if is_gone(error):
                raise CompactedError(str(error)) from error
            raise

    def _follow(self, follower: Follower, revision: int) -> None:
        """Tell of what came after `revision` until this master was elected and deposed again. Raises CompactedError, Corrupt."""
        backoff = self._backoff()
        while not self._stopped.is_set():
            try:
                if self._owner is None and self._lease is None:
                    self._campaign()
                self._watch = Watch(self._reading, self._prefix, _end_of(self._prefix), timeout_s=self._request_timeout_s)
                for events in self._watch.events(revision + 1):
                    self._note(None)
                    backoff.reset()
                    if (ownership := self._take(follower, events)) is not None:
                        self._watch.cancel()
                        self._own(follower, ownership)
                        return
                    if events.is_whole:
                        revision = events.revision
                    if self._owner is None and self._lease is None:
                        self._campaign()
            except (CatalogUnavailable, StaleEpoch) as error:
                if not self._stopped.is_set():
                    self._note(str(error))
                    self._stopped.wait(backoff.next_s())

    def _take(self, follower: Follower, events: Events) -> _Ownership | None:
        """Tell of the events; this master's ownership, if they elect it."""
        before, elected = self._owner, None
        records: list[tuple[bytes, bytes | None]] = []
        for event in events.events:
            if event.kv.key == self._owner_key:
                if event.type == event.DELETE:
                    self._owner = None
                else:
                    self._owned(event.kv)
                    if self._lease is not None and event.kv.lease == self._lease.lease_id:
                        elected = _Ownership(self._lease, int(event.kv.create_revision), int(event.kv.mod_revision))
            else:
                records.append((event.kv.key, None if event.type == event.DELETE else event.kv.value))
        self._give(follower, records)
        if elected is not None:
            return elected
        if self._lease is not None and not self._lease.is_valid:
            self._lease = None
        if self._owner != before:
            follower.owned_by(self._owner)
        return None

    def _give(self, follower: Follower, values: Iterable[tuple[bytes, bytes | None]]) -> None:
        at = len(self._records)
        for changes in as_changes((key[at:], value) for key, value in values if key.startswith(self._records)):
            follower.take(changes)

    def _owned(self, record: Any) -> None:
        """The owner's key, as it is now."""
        self._owner = _owner(record)
        if not record.lease:
            self._retire(record.mod_revision)

    def _retire(self, mod_revision: int) -> None:
        """Delete the key of an owner without a lease, a master of an earlier release: it would own the catalog until somebody took it."""
        request = rpc_pb2.TxnRequest()
        compare = request.compare.add(result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.MOD, key=self._owner_key)
        compare.mod_revision = mod_revision
        request.success.add().request_delete_range.key = self._owner_key
        self._reading.call("Txn", request, timeout_s=self._request_timeout_s)

    def _campaign(self) -> None:
        """Create the owner's key if there is none. Whether that made this master the owner, its watch will tell."""
        self._give_up()
        self._over.clear()
        if self._stopped.is_set():
            self._over.set()  # `close` may have done so just before
        lease = self._lease = Lease(self._leasing, self._lease_ttl_s, on_lost=self._end)
        request = rpc_pb2.TxnRequest()
        request.compare.add(result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.CREATE, key=self._owner_key, create_revision=0)
        put = request.success.add().request_put
        put.key, put.value, put.lease = self._owner_key, self._value(), lease.lease_id
        try:
            won = self._reading.call("Txn", request, timeout_s=self._request_timeout_s).succeeded
        except BaseException:
            self._give_up()
            raise
        if not won:
            self._give_up()

    def _give_up(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _own(self, follower: Follower, ownership: _Ownership) -> None:
        """From the election to its end."""
        if not self._over.is_set():
            LOG.info("catalog: this master owns it, in epoch %d", ownership.epoch)
            self._committer.admit(ownership)
            follower.elected(ownership.epoch)
            self._over.wait()
            if self._stopped.is_set():
                return
            self._committer.refuse(self._why_over)
            LOG.warning("catalog: this master owns it no longer: %s", self._why_over)
            follower.deposed(self._why_over)
        self._give_up()

    def _end(self, why: StaleEpoch) -> None:
        """From any thread."""
        self._why_over = why
        self._over.set()

    def _value(self) -> bytes:
        return json.dumps({"name": self._me.name, "address": self._me.address}).encode()

    def _note(self, trouble: str | None) -> None:
        """What `health` tells of following; an operator's log gets the changes only."""
        before, self._trouble = self._trouble, trouble
        if trouble is not None and before is None:
            LOG.warning("catalog: %s", trouble)

    def _identify(self, timeout_s: float) -> str:
        """The catalog's identity, written now if there is none: of several masters that try, one has its way, and all read it."""
        request = rpc_pb2.TxnRequest()
        request.compare.add(result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.MOD, key=self._identity_key, mod_revision=0)
        put = request.success.add().request_put
        put.key, put.value = self._identity_key, secrets.token_hex(IDENTITY_BYTES).encode()
        request.failure.add().request_range.key = self._identity_key
        reply = self._reading.call("Txn", request, timeout_s=timeout_s)
        found: bytes = put.value if reply.succeeded else reply.responses[0].response_range.kvs[0].value
        return found.decode()

    # Writing: in the committer's thread.

    def _write(self, changes: Sequence[Change], owned: _Ownership) -> None:
        """One attempt at a group: all its transactions, some at a time. They touch different keys, so their order is free."""
        if not owned.lease.is_valid:
            raise StaleEpoch("etcd: this master's lease is over")
        if owned.fence is None:
            owned.fence = self._move_fence(owned)
        waiting: deque[Reply] = deque()
        try:
            for part in cut(as_records(changes), max_ops=MAX_TXN_OPS, max_bytes=MAX_TXN_BYTES):
                if len(waiting) == self._in_flight:
                    self._settle(waiting.popleft())
                waiting.append(self._writing.start("Txn", self._transaction(part, owned), timeout_s=self._request_timeout_s))
            while waiting:
                self._settle(waiting.popleft())
        except Exception:
            owned.fence = None
            raise

    def _move_fence(self, owned: _Ownership) -> int:
        """Write the owner's key and return its revision, the fence from now on.

        The write compares the revision that was read just before: of several attempts at most the one that is answered, or an
        earlier one, takes effect, never one that lands late.
        """
        found = self._writing.call("Range", rpc_pb2.RangeRequest(key=self._owner_key), timeout_s=self._request_timeout_s).kvs
        if not found or found[0].create_revision != owned.epoch:
            raise _fenced(found)
        request = self._guarded(owned.epoch, found[0].mod_revision)
        put = request.success.add().request_put
        put.key, put.value, put.lease = self._owner_key, self._value(), owned.lease.lease_id
        reply = self._writing.call("Txn", request, timeout_s=self._request_timeout_s)
        if not reply.succeeded:
            raise CatalogUnavailable("etcd: the owner's key was written meanwhile")
        return int(reply.header.revision)

    def _settle(self, reply: Reply) -> None:
        outcome = reply.result()
        if not outcome.succeeded:
            raise _fenced(outcome.responses[0].response_range.kvs)

    def _transaction(self, part: Sequence[tuple[bytes, bytes | None]], owned: _Ownership) -> Any:
        assert owned.fence is not None
        request = self._guarded(owned.epoch, owned.fence)
        for key, value in part:
            if value is None:
                request.success.add().request_delete_range.key = self._records + key
            else:
                put = request.success.add().request_put
                put.key, put.value = self._records + key, value
        request.failure.add().request_range.key = self._owner_key
        return request

    def _guarded(self, epoch: int, fence: int) -> Any:
        """A transaction that takes effect only while this master is the owner that it was, and has not moved the fence."""
        request = rpc_pb2.TxnRequest()
        request.compare.add(result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.CREATE, key=self._owner_key, create_revision=epoch)
        request.compare.add(result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.MOD, key=self._owner_key, mod_revision=fence)
        return request

    def _patiently(self, attempt: Callable[[float], T], *, patience_s: float) -> T:
        """Call `attempt(timeout_s)` again until it succeeds, or the patience is over; then raise its last error. What will not be
        mended by asking again is raised at once."""
        give_up_at_s = time.monotonic() + patience_s
        backoff = self._backoff()
        while True:
            left_s = give_up_at_s - time.monotonic()
            try:
                return attempt(min(self._request_timeout_s, max(left_s, 0.001)))
            except CatalogUnavailable:
                delay_s = backoff.next_s()
                if delay_s >= give_up_at_s - time.monotonic() or self._stopped.wait(delay_s):
                    raise

    def _backoff(self) -> Backoff:
        return Backoff(first_s=0.05, longest_s=self._longest_backoff_s)


def cut(records: Mapping[bytes, bytes | None], *, max_ops: int, max_bytes: int) -> Iterator[list[tuple[bytes, bytes | None]]]:
    """The records in parts of at most `max_ops` and, unless a single one is larger, `max_bytes` of keys and values."""
    part: list[tuple[bytes, bytes | None]] = []
    part_bytes = 0
    for key, value in records.items():
        size_bytes = len(key) + len(value or b"")
        if len(part) == max_ops or (part and part_bytes + size_bytes > max_bytes):
            yield part
            part, part_bytes = [], 0
        part.append((key, value))
        part_bytes += size_bytes
    if part:
        yield part


def _end_of(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin with `prefix`."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _owner(record: Any) -> Owner:
    try:
        said = json.loads(record.value)
        return Owner(str(said["name"]), str(said["address"]), int(record.create_revision))
    except (ValueError, TypeError, KeyError):
        return Owner(record.value.decode(errors="replace"), "", int(record.create_revision))  # an earlier release's


def _fenced(found: Sequence[Any]) -> StaleEpoch:
    """`found`: the owner's key, if it is there."""
    name = _owner(found[0]).name if found else "nobody (its key is gone)"
    return StaleEpoch(f"etcd: the catalog is owned by {name} now")
