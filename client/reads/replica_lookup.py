"""Which node to ask for which keys of a get: what the client remembers, else what the master says, and of several replicas the best.
Sans-I/O: see effects.py."""

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
"""A key's index and where it is."""
Places = dict[int, list[Wanted]]
"""What to ask each node for, by its id. Keys that nobody has are left out."""

FAR_HINT_NS: Final = 10 * 1_000_000_000
"""After this long the master is asked again where a block of another host is: copies are made of what is read often."""
RENEW_TIMEOUT_S: Final = 0.25
"""A master that does not answer by then is not worth waiting for: the block is most likely still where it was."""


class ReplicaLookup:
    """The places of one get's keys."""

    def __init__(self, resources: ClientResources, keys: Sequence[bytes], deadline: Deadline) -> None:
        self._daemons = resources.daemons
        self._hints = resources.hints
        self._early_puts = resources.early_puts
        self._keys = keys
        self._deadline = deadline
        self._begun_ns = deadline.at_ns - int(deadline.timeout_s * 1e9)

    def known(self) -> Places | None:
        """The place of a single key that is remembered, without a question. None: use `first`."""
        hint = self._hints.find_one(self._keys[0]) if len(self._keys) == 1 else None
        if hint is None:
            return None
        found = {hint.node_id: [(0, hint)]}
        return None if self._old(found) else found

    def first(self) -> Operation[Places]:
        """As remembered, and from the master what is not, or was too long ago. Raises as Daemons.ask_master."""
        found = yield from self._find({0: list(range(len(self._keys)))}, self._deadline, from_hints=True)
        if len(self._early_puts) and (missing := self._missing(found)):
            # One with a hint is not missing: nothing is waited for unless the hints do not tell all that was put.
            may_have = self._early_puts.may_have([self._keys[i] for i in missing], self._hints)
            if may_have and (yield from self._early_puts.settle_soon(self._deadline)):
                for node_id, wanted in (yield from self._find({0: missing}, self._deadline, from_hints=False)).items():
                    found.setdefault(node_id, []).extend(wanted)
        if old := self._old(found):
            found = yield from self._renew(found, old)
        return found

    def _missing(self, found: Places) -> list[int]:
        """Keys that nobody is known to have: one that this client put, and has no hint of any more, may be among them."""
        there = {i for wanted in found.values() for i, _ in wanted}
        return [i for i in range(len(self._keys)) if i not in there]

    def anew(self, wanted: dict[int, list[int]]) -> Operation[Places]:
        """From the master: keys by the node to avoid (0: none). Raises as Daemons.ask_master."""
        return self._find(wanted, self._deadline, from_hints=False)

    def _find(self, wanted: dict[int, list[int]], deadline: Deadline, *, from_hints: bool) -> Operation[Places]:
        """Which node to ask for which keys; keys that nobody has are left out."""
        found: Places = {}
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
        """The partition's master, of keys of it."""
        reply = yield from self._daemons.ask_master(Lookup(list(keys), avoid), Locations, deadline, partition=partition)
        if any(reply.replicas) and not self._daemons.nodes.is_known:
            yield from self._daemons.refresh_nodes(deadline)  # which of them are on this host
        return list(self._best(reply, avoid))

    def _old(self, found: Places) -> dict[int, CachedLocation]:
        """What was on another host some time ago: a copy of it may be on this one by now, or where fewer ask for it."""
        nodes, until_ns = self._daemons.nodes, self._begun_ns - FAR_HINT_NS
        if not nodes.may_come_nearer:
            return {}
        far = (wanted for node_id, wanted in found.items() if not nodes.is_local(node_id))
        return {i: hint for wanted in far for i, hint in wanted if 0 < hint.asked_ns <= until_ns}

    def _renew(self, found: Places, old: dict[int, CachedLocation]) -> Operation[Places]:
        """Ask anew for what is old of `found`. It stays as it was if no master answers soon."""
        try:
            renewed = yield from self._find({0: list(old)}, self._deadline.part(RENEW_TIMEOUT_S), from_hints=False)
        except (Unavailable, DeadlineExceeded):
            self._hints.learn((self._keys[i], hint._replace(asked_ns=self._begun_ns)) for i, hint in old.items())
            return found
        for node_id, wanted in found.items():
            renewed.setdefault(node_id, []).extend(item for item in wanted if item[0] not in old)
        return {node_id: wanted for node_id, wanted in renewed.items() if wanted}

    def _best(self, reply: Locations, avoid: int) -> Iterator[CachedLocation | None]:
        """For each key the replica to read: on this host if possible, then in the fastest tier, then at the node that this client writes to
        (its slabs are mapped already), then whose turn it is."""
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
                        nodes.turn(node_id) if count > 1 else 0,
                        node_id,
                    )
                    best = min(best, rank) if best is not None else rank
            replica += count
            if best is None:
                yield None
            else:
                yield CachedLocation(best[-1], generation, size, self._begun_ns if best[0] and nodes.may_come_nearer else 0, count)
