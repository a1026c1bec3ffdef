"""Writes of the catalog's owner to etcd: transactions that take effect only while it owns the catalog.

A transaction without a response may still be under way and be applied late. So after any failure the owner's key is
written again before a retry. The write changes its mod revision, the fence: transactions that were sent under the old
fence no longer match. Those of a former owner do not match the epoch, which is the key's create revision."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.etcd.channel import EtcdChannel, Reply
from kvstore.master.catalogs.etcd.lease import EtcdLease, OwnerKey, owner_of
from kvstore.master.catalogs.segments.log import SegmentLog
from kvstore.master.catalogs.segments.merger import SegmentMerger
from kvstore.protocol.errors import CatalogUnavailable, StaleEpoch

MAX_TXN_OPS: Final = 128
"""etcd's default --max-txn-ops. It limits each branch of a transaction; compares are counted apart."""
MAX_TXN_BYTES: Final = 1024 * 1024
"""Keys and values of one transaction; etcd's default --max-request-bytes is 1.5 MiB with all overhead."""
MAX_IN_FLIGHT: Final = 4
"""Concurrent transactions of one group."""
MIN_READ_KEYS: Final = 4
MAX_READ_KEYS: Final = 4096


@dataclass(slots=True, eq=False)
class Ownership:
    """State from an election to its end. `fence` is the owner key's mod revision, None when it must be moved before
    the next write."""

    lease: EtcdLease
    epoch: int
    fence: int | None
    log: SegmentLog
    merging: SegmentMerger | None = None


class EtcdWriter:
    """Fenced reads and writes of one ownership; the `CatalogRecords` of its merges. Belongs to the committer's
    thread."""

    def __init__(self, channel: EtcdChannel, key: OwnerKey, owned: Ownership, *, timeout_s: float) -> None:
        self._channel = channel
        self._key = key
        self._owned = owned
        self._timeout_s = timeout_s

    def read(self, begin: bytes, end: bytes, *, max_bytes: int) -> list[tuple[bytes, bytes]]:
        """See CatalogRecords. The first request is small; the next ones are sized by its response."""
        prefix, limit = self._key.prefix, MIN_READ_KEYS
        found: list[tuple[bytes, bytes]] = []
        size_bytes, start = 0, prefix + begin
        while size_bytes < max_bytes:
            request = rpc_pb2.RangeRequest(key=start, range_end=prefix + end, limit=limit)
            reply = self._channel.call("Range", request, timeout_s=self._timeout_s)
            found += ((value.key.removeprefix(prefix), value.value) for value in reply.kvs)
            size_bytes += reply.ByteSize()
            if not reply.more:
                break
            start = reply.kvs[-1].key + b"\x00"
            limit = max(MIN_READ_KEYS, min(MAX_READ_KEYS, len(reply.kvs) * (max_bytes - size_bytes) // reply.ByteSize()))
        return found

    def write(self, values: Mapping[bytes, bytes | None]) -> None:
        """Write all values, in transactions of which several are in flight: their order is free. Raises StaleEpoch,
        CatalogUnavailable."""
        owned = self._owned
        if not owned.lease.is_valid:
            raise StaleEpoch("etcd: this master's lease is over")
        if owned.fence is None:
            owned.fence = self._move_fence()
        waiting: deque[Reply] = deque()
        try:
            for part in cut(values, max_ops=MAX_TXN_OPS, max_bytes=MAX_TXN_BYTES):
                if len(waiting) == MAX_IN_FLIGHT:
                    self._settle(waiting.popleft())
                waiting.append(self._channel.start("Txn", self._transaction(part, owned.fence), timeout_s=self._timeout_s))
            while waiting:
                self._settle(waiting.popleft())
        except Exception:
            owned.fence = None
            raise

    def _move_fence(self) -> int:
        """Write the owner's key again and return its revision, the new fence.

        The write compares the revision that was just read: an attempt that is applied late no longer matches."""
        found = self._channel.call("Range", rpc_pb2.RangeRequest(key=self._key.key), timeout_s=self._timeout_s).kvs
        if not found or found[0].create_revision != self._owned.epoch:
            raise _fenced(found)
        request = self._guarded(found[0].mod_revision)
        put = request.success.add().request_put
        put.key, put.value, put.lease = self._key.key, self._key.value, self._owned.lease.lease_id
        reply = self._channel.call("Txn", request, timeout_s=self._timeout_s)
        if not reply.succeeded:
            raise CatalogUnavailable("etcd: the owner's key was written meanwhile")
        return int(reply.header.revision)

    def _settle(self, reply: Reply) -> None:
        outcome = reply.result()
        if not outcome.succeeded:
            raise _fenced(outcome.responses[0].response_range.kvs)

    def _transaction(self, part: list[tuple[bytes, bytes | None]], fence: int) -> Any:
        request = self._guarded(fence)
        for key, value in part:
            if value is None:
                request.success.add().request_delete_range.key = self._key.prefix + key
            else:
                put = request.success.add().request_put
                put.key, put.value = self._key.prefix + key, value
        request.failure.add().request_range.key = self._key.key
        return request

    def _guarded(self, fence: int) -> Any:
        """Return a transaction that takes effect only in this epoch and under this fence."""
        request, equal, key = rpc_pb2.TxnRequest(), rpc_pb2.Compare.EQUAL, self._key.key
        request.compare.add(result=equal, target=rpc_pb2.Compare.CREATE, key=key, create_revision=self._owned.epoch)
        request.compare.add(result=equal, target=rpc_pb2.Compare.MOD, key=key, mod_revision=fence)
        return request


def cut(values: Mapping[bytes, bytes | None], *, max_ops: int, max_bytes: int) -> Iterator[list[tuple[bytes, bytes | None]]]:
    """Split the values into parts of at most `max_ops` values and, unless a single one is larger, `max_bytes` of
    keys and values."""
    part: list[tuple[bytes, bytes | None]] = []
    part_bytes = 0
    for key, value in values.items():
        size_bytes = len(key) + len(value or b"")
        if len(part) == max_ops or (part and part_bytes + size_bytes > max_bytes):
            yield part
            part, part_bytes = [], 0
        part.append((key, value))
        part_bytes += size_bytes
    if part:
        yield part


def _fenced(found: Any) -> StaleEpoch:
    """Return the error for the owner's key `found`, empty if it does not exist."""
    name = owner_of(found[0]).name if found else "no master (its key is deleted)"
    return StaleEpoch(f"etcd: the catalog is owned by {name} now")
