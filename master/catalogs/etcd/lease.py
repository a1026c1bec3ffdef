"""The key that the catalog's owner holds: {"name": ..., "address": ...} under its lease. Its create revision is the epoch."""

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
    """Of the catalog under `prefix`, which ends in a slash, as `me` would write it."""

    prefix: bytes
    me: Candidate

    @property
    def key(self) -> bytes:
        return self.prefix + b"owner"

    @property
    def value(self) -> bytes:
        return json.dumps({"name": self.me.name, "address": self.me.address}).encode()


def owner_of(record: Any) -> CatalogOwner:
    """Return who wrote the key. A value of another form gives its text as the name, and no address."""
    try:
        said = json.loads(record.value)
        return CatalogOwner(str(said["name"]), str(said["address"]), int(record.create_revision))
    except (ValueError, TypeError, KeyError):
        return CatalogOwner(record.value.decode(errors="replace"), "", int(record.create_revision))


def end_of(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin with `prefix`."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


RENEWALS: Final = 3
"""In the time of a lease, each with as long for its answer: one may fail."""
RETRIES: Final = 10
"""In the time of a lease, after one that failed: the next endpoint, say, is asked while there is time left for its answer."""
REVOKE_TIMEOUT_S: Final = 1.0


class EtcdLease:
    """A granted lease. `on_lost(why)` is called once, in the lease's own thread, unless it is closed first. Thread-safe."""

    def __init__(
        self, channel: EtcdChannel, ttl_s: float, *, on_lost: Callable[[StaleEpoch], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Ask etcd for it, which rounds `ttl_s` up to whole seconds, and to its own least. Raises CatalogUnavailable, ConfigError."""
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
        self._thread = threading.Thread(target=self._keep, name="catalog-lease", daemon=True)
        self._thread.start()

    @property
    def is_valid(self) -> bool:
        """Nobody else can have been elected yet."""
        return not self._ended.is_set() and self._clock() < self._valid_until_s

    def close(self) -> None:
        """Give it up: etcd deletes its keys now. It ends by itself if etcd cannot be told. A second call is a no-op."""
        first = not self._ended.is_set()
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if first:
            self._revoke()

    def _keep(self) -> None:
        trouble, wait_s = "its renewals were not answered", self._ttl_s / RENEWALS
        while not self._ended.wait(max(0.0, min(wait_s, self._valid_until_s - self._clock()))):
            sent_s = self._clock()
            left_s = self._valid_until_s - sent_s
            if left_s <= 0:
                self._lose(f"etcd: the lease could not be kept: {trouble}")
                return
            try:
                ttl_s = self._renew(min(left_s, self._ttl_s / RENEWALS))
            except Exception as error:  # gRPC needs a thread for each, which there may be none for: this one has to go on and tell
                trouble, wait_s = str(typed(error)), self._ttl_s / RETRIES
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
        with contextlib.suppress(Exception):  # it ends by itself
            self._channel.call("LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=self.lease_id), timeout_s=REVOKE_TIMEOUT_S)


def with_key(channel: EtcdChannel, key: bytes, value: bytes, *, ttl_s: float, timeout_s: float) -> EtcdLease:
    """A lease with this key under it, which is there for as long as the lease. Raises CatalogUnavailable, ConfigError."""
    lease = EtcdLease(channel, ttl_s, on_lost=lambda _why: None)
    request = rpc_pb2.TxnRequest()
    put = request.success.add().request_put
    put.key, put.value, put.lease = key, value, lease.lease_id
    try:
        channel.call("Txn", request, timeout_s=timeout_s)
    except BaseException:
        lease.close()  # whether the key is there is not known
        raise
    return lease
