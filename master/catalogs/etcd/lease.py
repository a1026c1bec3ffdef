"""etcd leases, and the key that the catalog's owner holds under one: {"name": ..., "address": ...}. Its create
revision is the epoch."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.etcd.channel import EtcdChannel
from kvstore.master.catalogs.interface import Candidate, CatalogOwner
from kvstore.protocol.errors import StaleEpoch, typed


@dataclass(frozen=True, slots=True)
class OwnerKey:
    """Key and value by which `me` owns the catalog under `prefix`, which ends in a slash."""

    prefix: bytes
    me: Candidate

    @property
    def key(self) -> bytes:
        return self.prefix + b"owner"

    @property
    def value(self) -> bytes:
        return json.dumps({"name": self.me.name, "address": self.me.address}).encode()


def owner_of(record: Any) -> CatalogOwner:
    """Parse the owner's key. A malformed value becomes the name, without an address."""
    try:
        fields = json.loads(record.value)
        return CatalogOwner(str(fields["name"]), str(fields["address"]), int(record.create_revision))
    except (ValueError, TypeError, KeyError):
        return CatalogOwner(record.value.decode(errors="replace"), "", int(record.create_revision))


def end_of(prefix: bytes) -> bytes:
    """Return the exclusive end of the range of keys that begin with `prefix`."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


RENEWALS: Final = 3
"""Renewals in a lease's time, each with that share as its timeout: one may fail."""
RETRIES: Final = 10
"""Retries in a lease's time after a failed renewal: time is left for the next endpoint."""
REVOKE_TIMEOUT_S: Final = 1.0


class EtcdLease:
    """A granted lease and the thread that renews it. Thread-safe.

    `on_lost(why)` is called once, in that thread, unless the lease is closed first."""

    def __init__(
        self, channel: EtcdChannel, ttl_s: float, *, on_lost: Callable[[StaleEpoch], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Request the lease. etcd rounds `ttl_s` up to whole seconds and its own minimum. Raises CatalogUnavailable,
        ConfigError."""
        self._channel = channel
        self._on_lost = on_lost
        self._clock = clock
        self._ended = threading.Event()
        sent_s = clock()
        request = rpc_pb2.LeaseGrantRequest(TTL=max(1, -int(-ttl_s // 1)))
        granted = channel.call("LeaseGrant", request, timeout_s=ttl_s)
        self.lease_id = int(granted.ID)
        self._ttl_s = float(min(ttl_s, granted.TTL))
        self._valid_until_s = sent_s + self._ttl_s
        self._thread = threading.Thread(target=self._renew_until_ended, name="catalog-lease", daemon=True)
        self._thread.start()

    @property
    def is_valid(self) -> bool:
        """True while no other master can have been elected."""
        return not self._ended.is_set() and self._clock() < self._valid_until_s

    def close(self) -> None:
        """Revoke the lease: etcd deletes its keys now, or when it expires if etcd is unreachable. Idempotent."""
        first = not self._ended.is_set()
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if first:
            self._revoke()

    def _renew_until_ended(self) -> None:
        problem, wait_s = "its renewals were not answered", self._ttl_s / RENEWALS
        while not self._ended.wait(max(0.0, min(wait_s, self._valid_until_s - self._clock()))):
            sent_s = self._clock()
            left_s = self._valid_until_s - sent_s
            if left_s <= 0:
                self._lose(f"etcd: the lease could not be kept: {problem}")
                return
            try:
                ttl_s = self._renew(min(left_s, self._ttl_s / RENEWALS))
            except Exception as error:  # gRPC starts a thread for each, which may fail: this thread has to go on
                problem, wait_s = str(typed(error)), self._ttl_s / RETRIES
                continue
            if ttl_s <= 0:
                self._lose("etcd: the lease is over")
                return
            self._valid_until_s, wait_s = sent_s + self._ttl_s, self._ttl_s / RENEWALS

    def _renew(self, timeout_s: float) -> float:
        requests = iter([rpc_pb2.LeaseKeepAliveRequest(ID=self.lease_id)])
        return float(next((answer.TTL for answer in self._stream(requests, timeout_s)), 0))

    def _stream(self, requests: Iterator[Any], timeout_s: float) -> Iterator[Any]:
        return iter(self._channel.stream("LeaseKeepAlive", requests, connect_timeout_s=timeout_s, timeout_s=timeout_s))

    def _lose(self, why: str) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._on_lost(StaleEpoch(why))
            self._revoke()

    def _revoke(self) -> None:
        with contextlib.suppress(Exception):  # it expires otherwise
            self._channel.call("LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=self.lease_id), timeout_s=REVOKE_TIMEOUT_S)


def lease_with_key(channel: EtcdChannel, key: bytes, value: bytes, *, ttl_s: float, timeout_s: float) -> EtcdLease:
    """Return a lease with `key` under it, which exists as long as the lease. Raises CatalogUnavailable, ConfigError."""
    lease = EtcdLease(channel, ttl_s, on_lost=lambda _why: None)
    request = rpc_pb2.TxnRequest()
    put = request.success.add().request_put
    put.key, put.value, put.lease = key, value, lease.lease_id
    try:
        channel.call("Txn", request, timeout_s=timeout_s)
    except BaseException:
        lease.close()  # the key may or may not exist
        raise
    return lease
