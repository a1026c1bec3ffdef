"""Membership of masters in etcd: each live master has a key under a lease of its own.

PREFIX.masters/ADDRESS    {"name": ..., "control": ..., "key": ...}

The key authenticates its bearer to that master as a peer master (security/authenticator.py): a reader of this range
has a master's rights."""

import json
import logging
import threading
from collections.abc import Mapping
from typing import Any, Final

from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.etcd.channel import EtcdChannel
from kvstore.master.catalogs.etcd.lease import EtcdLease, end_of, lease_with_key
from kvstore.master.catalogs.group_commit import Backoff
from kvstore.master.catalogs.interface import NO_PEERS, Candidate, MasterContact, PeerMaster
from kvstore.protocol.errors import typed

POLL_S: Final = 0.5
"""Interval at which the live masters are read."""

log = logging.getLogger("kvstore.master")


class EtcdMembers:
    """Registers this master and polls the live ones, in a thread of its own; the lease has another. `stop` is
    thread-safe.

    `live_masters` has the addresses of the live masters, and is empty while they are unknown. `peer_masters` has the others as
    last known. `health` is None, or the reason that they are unknown."""

    def __init__(
        self, channel: EtcdChannel, prefix: str, me: Candidate, contact: MasterContact, *, lease_ttl_s: float, timeout_s: float
    ) -> None:
        self._channel = channel
        self._prefix = f"{prefix}.masters/".encode()
        self._me = me
        self._contact = contact
        self._lease_ttl_s = lease_ttl_s
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._lease: EtcdLease | None = None
        self.live_masters: frozenset[str] = frozenset()
        self.peer_masters: Mapping[str, PeerMaster] = NO_PEERS
        self.health: str | None = None
        self._thread = threading.Thread(target=self._run, name="catalog-members", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Revoke this master's key and stop."""
        self._stopped.set()
        self._thread.join(self._timeout_s)
        if self._lease is not None:
            self._lease.close()

    def _run(self) -> None:
        backoff, failures = Backoff(first_s=POLL_S, longest_s=4 * POLL_S), 0
        while not self._stopped.is_set():
            try:
                if self._lease is None or not self._lease.is_valid:
                    self._register()
                found_masters = self._read_members()
                self.live_masters = frozenset(found_masters)
                self.peer_masters = {address: peer_master for address, peer_master in found_masters.items() if address != self._me.address}
                self.health, failures = None, 0
                backoff.reset()
                self._stopped.wait(POLL_S)
            except Exception as error:  # also gRPC's, when a thread cannot be started
                self.live_masters = frozenset()  # `peer_masters` stays: an address and key hold as long as their master lives
                failures += 1
                problem = f"the live masters are unknown: {typed(error)}"
                if failures == 1:
                    log.warning(problem)
                else:  # one failure is a reconnection
                    self.health = problem
                self._stopped.wait(backoff.next_s())

    def _register(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None
        key, fields = self._prefix + self._me.address.encode(), json.dumps({"name": self._me.name, **self._contact._asdict()})
        self._lease = lease_with_key(self._channel, key, fields.encode(), ttl_s=self._lease_ttl_s, timeout_s=self._timeout_s)

    def _read_members(self) -> dict[str, PeerMaster]:
        request = rpc_pb2.RangeRequest(key=self._prefix, range_end=end_of(self._prefix))
        found = self._channel.call("Range", request, timeout_s=self._timeout_s).kvs
        return {record.key.removeprefix(self._prefix).decode(errors="replace"): _parse_peer(record.value) for record in found}


def _parse_peer(value: bytes) -> PeerMaster:
    try:
        fields: Any = json.loads(value)
        return PeerMaster(str(fields["name"]), MasterContact(str(fields["control"]), str(fields["key"])))
    except (ValueError, TypeError, KeyError):
        return PeerMaster(value.decode(errors="replace"), MasterContact())
