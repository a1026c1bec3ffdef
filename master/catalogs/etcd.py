"""The catalog `etcd://...`: the directory's records in etcd, one key each, written by group commit and fenced by the owner's key.

    PREFIX/owner      who owns the catalog; its mod_revision is the fence that every transaction compares
    PREFIX/identity   what tells this catalog from others; written once
    PREFIX/r/KEY      one record; KEY is the catalog key's raw bytes

A transaction that got no answer may still be on its way and land late. So after any failure the owner's key is written again before
anything is retried: the fence moves, and what was sent under the old one no longer matches.
"""

import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.backoff import Backoff
from kvstore.master.catalogs.etcd_channel import EtcdAccess, EtcdChannel, Reply, is_gone
from kvstore.master.catalogs.etcd_version import warn_of_data_bug
from kvstore.master.catalogs.group_commit import Changes, GroupCommit
from kvstore.master.catalogs.interface import IDENTITY_BYTES, Catalog, Done, Op
from kvstore.protocol.errors import CatalogUnavailable, StaleEpoch

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

Change = tuple[bytes, bytes | None]
T = TypeVar("T")


class EtcdCatalog(Catalog):
    """See Catalog. Writes come from one thread of its own; `load` reads in the caller's."""

    scheme: ClassVar[str] = "etcd"

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str = "/kvstore",
        access: EtcdAccess = EtcdAccess(),  # noqa: B008 - frozen
        in_flight: int = 4,
        request_timeout_s: float = 5.0,
        longest_backoff_s: float = 2.0,
    ) -> None:
        """`endpoints` are `host:port`. `in_flight` transactions of one group are sent at once, each with `request_timeout_s`.

        Raises ConfigError when a file of `access` cannot be read.
        """
        self._channel = EtcdChannel(endpoints, access)
        self._owner_key = prefix.encode() + b"/owner"
        self._identity_key = prefix.encode() + b"/identity"
        self._records = prefix.encode() + b"/r/"
        self._owner = f"{socket.gethostname()}:{secrets.token_hex(8)}".encode()
        self._in_flight = in_flight
        self._request_timeout_s = request_timeout_s
        self._longest_backoff_s = longest_backoff_s
        self._patience_s = request_timeout_s
        self._epoch = 0
        self._identity = ""
        self._fence: int | None = None
        self._stopped = threading.Event()
        self._committer = GroupCommit(self._write, backoff=self._backoff(), interrupt=self._channel.close)

    def open(self, *, deadline_s: float) -> int:
        """See Catalog. Warns in the log when the server's version is known to lose or corrupt data."""
        self._patience_s = deadline_s
        status = self._patiently(lambda timeout_s: self._channel.call("Status", rpc_pb2.StatusRequest(), timeout_s=timeout_s))
        warn_of_data_bug(status.version)
        self._identity = self._patiently(self._identify)
        self._epoch = self._patiently(lambda timeout_s: self._claim(timeout_s, opening=True))
        self._fence = self._epoch
        self._committer.start()
        return self._epoch

    @property
    def identity(self) -> str:
        return self._identity

    def load(self) -> Iterator[tuple[bytes, bytes]]:
        """See Catalog. Raises CatalogUnavailable when a page does not come within the deadline given to `open`, or, at
        once, when etcd compacted away the state as of the open meanwhile.
        """
        end = self._records[:-1] + bytes([self._records[-1] + 1])
        page = rpc_pb2.RangeRequest(key=self._records, range_end=end, revision=self._epoch, limit=MIN_PAGE_KEYS)
        while True:
            reply = self._patiently(lambda timeout_s: self._read_page(page, timeout_s))
            for record in reply.kvs:
                yield record.key[len(self._records) :], record.value
            if not reply.more:
                return
            page.key = reply.kvs[-1].key + b"\x00"
            page.limit = max(MIN_PAGE_KEYS, min(MAX_PAGE_KEYS, len(reply.kvs) * PAGE_BYTES // reply.ByteSize()))

    def _read_page(self, page: Any, timeout_s: float) -> Any:
        try:
            return self._channel.call("Range", page, timeout_s=timeout_s)
        except CatalogUnavailable:
            page.limit = MIN_PAGE_KEYS
            raise

    def commit(self, ops: Sequence[Op], done: Done) -> None:
        self._committer.submit(ops, done)

    @property
    def health(self) -> str:
        return self._committer.health

    def close(self) -> None:
        self._stopped.set()
        self._committer.close()
        self._channel.close()

    def _identify(self, timeout_s: float) -> str:
        """The catalog's identity, written now if there is none: of several masters that try, one has its way, and all read it."""
        request = rpc_pb2.TxnRequest()
        request.compare.add(result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.MOD, key=self._identity_key, mod_revision=0)
        put = request.success.add().request_put
        put.key, put.value = self._identity_key, secrets.token_hex(IDENTITY_BYTES).encode()
        request.failure.add().request_range.key = self._identity_key
        reply = self._channel.call("Txn", request, timeout_s=timeout_s)
        found: bytes = put.value if reply.succeeded else reply.responses[0].response_range.kvs[0].value
        return found.decode()

    def _claim(self, timeout_s: float, *, opening: bool = False) -> int:
        """Write the owner's key and return its revision, the fence from now on.

        The write compares the revision that was read just before: of several attempts at most the one that is answered, or an
        earlier one, takes effect, never one that lands late. Raises StaleEpoch when another owner is there and not `opening`.
        """
        found = self._channel.call("Range", rpc_pb2.RangeRequest(key=self._owner_key), timeout_s=timeout_s).kvs
        if not opening and (not found or found[0].value != self._owner):
            raise _fenced(found)
        request = self._guarded(found[0].mod_revision if found else 0)
        put = request.success.add().request_put
        put.key, put.value = self._owner_key, self._owner
        reply = self._channel.call("Txn", request, timeout_s=timeout_s)
        if not reply.succeeded:
            raise CatalogUnavailable("etcd: another master took the catalog at the same moment")
        return int(reply.header.revision)

    def _write(self, changes: Changes) -> None:
        """One attempt at a group: all its transactions, some at a time. They touch different keys, so their order is free."""
        if self._fence is None:
            self._fence = self._claim(self._request_timeout_s)
        waiting: deque[Reply] = deque()
        try:
            for part in cut(changes, max_ops=MAX_TXN_OPS, max_bytes=MAX_TXN_BYTES):
                if len(waiting) == self._in_flight:
                    self._settle(waiting.popleft())
                waiting.append(self._channel.start("Txn", self._transaction(part, self._fence), timeout_s=self._request_timeout_s))
            while waiting:
                self._settle(waiting.popleft())
        except Exception:
            self._fence = None
            raise

    def _settle(self, reply: Reply) -> None:
        outcome = reply.result()
        if not outcome.succeeded:
            raise _fenced(outcome.responses[0].response_range.kvs)

    def _transaction(self, part: Sequence[Change], fence: int) -> Any:
        request = self._guarded(fence)
        for key, value in part:
            operation = request.success.add()
            if value is None:
                operation.request_delete_range.key = self._records + key
            else:
                put = operation.request_put
                put.key, put.value = self._records + key, value
        return request

    def _guarded(self, owner_revision: int) -> Any:
        """A transaction that takes effect only while the owner's key has this mod_revision (0: is absent), and else tells it."""
        request = rpc_pb2.TxnRequest()
        request.compare.add(result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.MOD, key=self._owner_key, mod_revision=owner_revision)
        request.failure.add().request_range.key = self._owner_key
        return request

    def _patiently(self, attempt: Callable[[float], T]) -> T:
        """Try until it succeeds, for as long as `open` was given. `attempt` gets the time that one call of it may take, in seconds."""
        give_up_at_s = time.monotonic() + self._patience_s
        backoff = self._backoff()
        while True:
            left_s = give_up_at_s - time.monotonic()
            try:
                return attempt(min(self._request_timeout_s, max(left_s, 0.001)))
            except CatalogUnavailable as error:
                if is_gone(error):
                    raise
                delay_s = backoff.next_s()
                if delay_s >= give_up_at_s - time.monotonic() or self._stopped.wait(delay_s):
                    raise

    def _backoff(self) -> Backoff:
        return Backoff(first_s=0.05, longest_s=self._longest_backoff_s)


def cut(changes: Changes, *, max_ops: int, max_bytes: int) -> Iterator[list[Change]]:
    """The changes in parts of at most `max_ops` and, unless a single change is larger, `max_bytes` of keys and values."""
    part: list[Change] = []
    part_bytes = 0
    for key, value in changes.items():
        size_bytes = len(key) + len(value or b"")
        if len(part) == max_ops or (part and part_bytes + size_bytes > max_bytes):
            yield part
            part, part_bytes = [], 0
        part.append((key, value))
        part_bytes += size_bytes
    if part:
        yield part


def _fenced(owner: Sequence[Any]) -> StaleEpoch:
    """`owner`: the owner's key as found, if any."""
    name = owner[0].value.decode(errors="replace") if owner else "nobody (its key was removed)"
    return StaleEpoch(f"etcd: the catalog is owned by {name} now")
