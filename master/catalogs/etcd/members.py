"""Which masters live, as far as etcd knows: each has a key under a lease of its own. Two threads: the lease's, and one that looks.

PREFIX.masters/ADDRESS    the master's name
"""

import logging
import threading
from typing import Final

from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.backoff import Backoff
from kvstore.master.catalogs.etcd.channel import EtcdChannel
from kvstore.master.catalogs.etcd.lease import Lease
from kvstore.master.catalogs.etcd.owner_key import end_of
from kvstore.master.catalogs.interface import Candidate
from kvstore.protocol.errors import KVStoreError

LOOK_S: Final = 0.5
"""How often it is looked who lives."""

log = logging.getLogger("kvstore.master")


class EtcdMembers:
    """`living`: addresses of the masters that live; empty while that is not known. `stop` may be called from any thread."""

    def __init__(self, channel: EtcdChannel, prefix: str, me: Candidate, *, lease_ttl_s: float, timeout_s: float) -> None:
        self._channel = channel
        self._prefix = f"{prefix}.masters/".encode()
        self._me = me
        self._lease_ttl_s = lease_ttl_s
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._lease: Lease | None = None
        self.living: frozenset[str] = frozenset()
        self._thread = threading.Thread(target=self._run, name="catalog-members", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Live no more."""
        self._stopped.set()
        self._thread.join(self._timeout_s)
        if self._lease is not None:
            self._lease.close()

    def _run(self) -> None:
        backoff = Backoff(first_s=LOOK_S, longest_s=4 * LOOK_S)
        while not self._stopped.is_set():
            try:
                if self._lease is None or not self._lease.is_valid:
                    self._enter()
                self.living = self._look()
                backoff.reset()
                self._stopped.wait(LOOK_S)
            except KVStoreError as error:
                self.living = frozenset()
                log.warning("which masters live is not known: %s", error)
                self._stopped.wait(backoff.next_s())

    def _enter(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None
        self._lease = Lease(self._channel, self._lease_ttl_s, on_lost=lambda _why: None)
        request = rpc_pb2.TxnRequest()
        put = request.success.add().request_put
        put.key, put.value, put.lease = self._prefix + self._me.address.encode(), self._me.name.encode(), self._lease.lease_id
        self._channel.call("Txn", request, timeout_s=self._timeout_s)

    def _look(self) -> frozenset[str]:
        request = rpc_pb2.RangeRequest(key=self._prefix, range_end=end_of(self._prefix), keys_only=True)
        found = self._channel.call("Range", request, timeout_s=self._timeout_s).kvs
        return frozenset(value.key.removeprefix(self._prefix).decode(errors="replace") for value in found)
