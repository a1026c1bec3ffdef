"""Locations of a get's keys: from the location cache, else from the master; of several replicas the best. Sans-I/O: see
effects.py."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from kvstore.client.connections.locations import CachedLocation
from kvstore.client.connections.partition_requests import by_partition
from kvstore.client.connections.resources import ClientResources
from kvstore.client.core.effects import Operation
from kvstore.protocol.errors import DeadlineExceeded, Unavailable
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.master_messages import Locations, Lookup
from kvstore.rpc.deadline import Deadline

Wanted = tuple[int, CachedLocation]
"""A key's index and its location."""
KeysByNode = dict[int, list[Wanted]]
"""Keys to read by node id; keys without a location are left out."""

REMOTE_HINT_TTL_NS: Final = 10 * 1_000_000_000
"""Age at which a remote location is refreshed: frequently read blocks get hot copies."""
REFRESH_TIMEOUT_S: Final = 0.25
"""Longest wait for a refresh; the block is most likely still at its old location."""


class ReplicaLookup:
    """Locations of one get's keys."""

    def __init__(self, resources: ClientResources, keys: Sequence[bytes], deadline: Deadline) -> None:
        self._daemons = resources.daemons
        self._hints = resources.hints
        self._early_puts = resources.uncommitted_puts
        self._keys = keys
        self._deadline = deadline
        self._begun_ns = deadline.at_ns - int(deadline.timeout_s * 1e9)

    def cached(self) -> KeysByNode | None:
        """Location of a single key from the cache, without a request. None: use `first`."""
        hint = self._hints.find_one(self._keys[0]) if len(self._keys) == 1 else None
        if hint is None:
            return None
        found = {hint.node_id: [(0, hint)]}
        return None if self._stale(found) else found

    def first(self) -> Operation[KeysByNode]:
        """Locations from the cache, and from the master for keys without one or with a stale one. Raises as
        `call_master`."""
        found = yield from self._find({0: list(range(len(self._keys)))}, self._deadline, from_hints=True)
        if len(self._early_puts) and (missing := self._missing(found)):
            # A key with a cached location is not missing: wait only if the cache is incomplete.
            may_have = self._early_puts.may_have([self._keys[i] for i in missing], self._hints)
            if may_have and (yield from self._early_puts.settle_briefly(self._deadline)):
                for node_id, wanted in (yield from self._find({0: missing}, self._deadline, from_hints=False)).items():
                    found.setdefault(node_id, []).extend(wanted)
        if stale := self._stale(found):
            found = yield from self._refresh_stale(found, stale)
        return found

    def _missing(self, found: KeysByNode) -> list[int]:
        """Keys without a location; among them may be a put of this client that left the cache."""
        there = {i for wanted in found.values() for i, _ in wanted}
        return [i for i in range(len(self._keys)) if i not in there]

    def find_again(self, wanted: dict[int, list[int]]) -> Operation[KeysByNode]:
        """Locations from the master: keys by the node to avoid (0: none). Raises as `call_master`."""
        return self._find(wanted, self._deadline, from_hints=False)

    def _find(self, wanted: dict[int, list[int]], deadline: Deadline, *, from_hints: bool) -> Operation[KeysByNode]:
        """Locations by node; keys without one are left out."""
        found: KeysByNode = {}
        for avoid, indices in wanted.items():
            unknown = indices
            if from_hints:
                hints = self._hints.find([self._keys[i] for i in indices])
                for i, hint in zip(indices, hints, strict=True):
                    if hint is not None:
                        found.setdefault(hint.node_id, []).append((i, hint))
                unknown = [i for i, hint in zip(indices, hints, strict=True) if hint is None]
            for start in range(0, len(unknown), MAX_BATCH):
                part = unknown[start : start + MAX_BATCH]
                hints = yield from by_partition(self._daemons, [self._keys[i] for i in part], deadline, partial(self._ask, avoid, deadline))
                learned = []
                for i, hint in zip(part, hints, strict=True):
                    if hint is not None:
                        found.setdefault(hint.node_id, []).append((i, hint))
                        learned.append((self._keys[i], hint))
                self._hints.learn(learned)
        return found

    def _ask(self, avoid: int, deadline: Deadline, partition: int, keys: Sequence[bytes]) -> Operation[list[CachedLocation | None]]:
        """Look keys of one partition up at its master."""
        reply = yield from self._daemons.call_master(Lookup(list(keys), avoid), Locations, deadline, partition=partition)
        if any(reply.replicas) and not self._daemons.nodes.is_known:
            yield from self._daemons.refresh_nodes(deadline)  # which of them are on this host
        return list(self._best(reply, avoid))

    def _stale(self, found: KeysByNode) -> dict[int, CachedLocation]:
        """Remote locations over their TTL: a better replica may exist by now."""
        nodes, until_ns = self._daemons.nodes, self._begun_ns - REMOTE_HINT_TTL_NS
        if not nodes.may_gain_better_replica:
            return {}
        far = (wanted for node_id, wanted in found.items() if not nodes.is_local(node_id))
        return {i: hint for wanted in far for i, hint in wanted if 0 < hint.asked_ns <= until_ns}

    def _refresh_stale(self, found: KeysByNode, stale: dict[int, CachedLocation]) -> Operation[KeysByNode]:
        """Refresh the stale locations of `found`, which is returned as it was if no master answers in time."""
        try:
            refreshed = yield from self._find({0: list(stale)}, self._deadline.part(REFRESH_TIMEOUT_S), from_hints=False)
        except (Unavailable, DeadlineExceeded):
            self._hints.learn((self._keys[i], hint._replace(asked_ns=self._begun_ns)) for i, hint in stale.items())
            return found
        for node_id, wanted in found.items():
            refreshed.setdefault(node_id, []).extend(item for item in wanted if item[0] not in stale)
        return {node_id: wanted for node_id, wanted in refreshed.items() if wanted}

    def _best(self, reply: Locations, avoid: int) -> Iterator[CachedLocation | None]:
        """Best replica of each key: on this host, then in the fastest tier, then at the preferred node (its slabs are
        mapped), then by `preference`."""
        nodes, replica = self._daemons.nodes, 0
        for count, size, generation in zip(reply.replicas, reply.sizes, reply.generations, strict=True):
            best = None
            for at in range(replica, replica + count):
                node_id, tiers = reply.nodes[at], reply.tiers[at]
                if node_id != avoid:
                    rank = (
                        not nodes.is_local(node_id),
                        tiers & -tiers,
                        node_id != nodes.local_id,
                        nodes.preference(node_id) if count > 1 else 0,
                        node_id,
                    )
                    best = min(best, rank) if best is not None else rank
            replica += count
            if best is None:
                yield None
            else:
                yield CachedLocation(best[-1], generation, size, self._begun_ns if best[0] and nodes.may_gain_better_replica else 0, count)
