"""Metadata requests to the master: existence, locations, removal, pins and replica targets. Sans-I/O: see
effects.py."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvstore.client.connections.cluster_connections import ClusterConnections
from kvstore.client.connections.locations import Location, tier_names
from kvstore.client.connections.partition_requests import by_partition, for_all_partitions
from kvstore.client.connections.resources import ClientResources
from kvstore.client.core.arguments import check_keys, check_ttl
from kvstore.client.core.effects import Operation, SleepEffect
from kvstore.protocol.errors import Unavailable
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.master_messages import (
    Exists,
    Locations,
    Lookup,
    MatchPrefix,
    Pin,
    PinFor,
    Remove,
    RemoveMatching,
    Replicate,
    check_pattern,
)
from kvstore.protocol.message import REPLICAS_NO_BLOCK, REPLICAS_NO_NODES, REPLICAS_PENDING, Message
from kvstore.protocol.session_messages import Count, Flags
from kvstore.rpc.deadline import Deadline


class MetadataOperations:
    """Metadata requests of one client.

    All raise InvalidArgument for malformed keys, and as `call_master`. They wait for uncommitted puts of this client:
    removes and pins until the commit, lookups that may concern them only briefly.
    """

    def __init__(self, resources: ClientResources) -> None:
        self._daemons = resources.daemons
        self._hints = resources.hints
        self._early_puts = resources.uncommitted_puts
        self._counters = resources.counters

    def ping(self, deadline: Deadline) -> Operation[None]:
        """Send an empty request to the owner of each partition."""
        self._counters.add(requests=1)
        yield from for_all_partitions(
            self._daemons, deadline, lambda partition: self._daemons.call_master(Exists([]), Flags, deadline, partition=partition)
        )

    def locate(self, keys: Sequence[bytes], deadline: Deadline) -> Operation[list[list[Location]]]:
        self._counters.add(requests=1)
        check_keys(keys)
        if self._early_puts.may_have(keys, self._hints):
            yield from self._early_puts.settle_briefly(deadline)

        def ask(partition: int, keys: Sequence[bytes]) -> Operation[list[list[Location]]]:
            found: list[list[Location]] = []
            for part in cut(keys):
                reply = yield from self._daemons.call_master(Lookup(list(part)), Locations, deadline, partition=partition)
                if any(self._daemons.nodes.get(node_id) is None for node_id in reply.nodes):
                    yield from self._daemons.refresh_nodes(deadline)
                found += self._locations(reply)
            return found

        return (yield from by_partition(self._daemons, keys, deadline, ask))

    def _locations(self, reply: Locations) -> Iterator[list[Location]]:
        replica = 0
        for i, count in enumerate(reply.replicas):
            locations = []
            for node_id, tiers in zip(reply.nodes[replica : replica + count], reply.tiers[replica : replica + count], strict=True):
                node = self._daemons.nodes.get(node_id)
                name = node.name if node is not None else ""
                locations.append(Location(name, node_id, tier_names(tiers), reply.sizes[i], reply.checksums[i], reply.generations[i]))
            replica += count
            yield locations

    def exists(self, keys: Sequence[bytes], deadline: Deadline) -> Operation[list[bool]]:
        self._counters.add(requests=1)
        check_keys(keys)
        if self._early_puts.may_have(keys, self._hints):
            yield from self._early_puts.settle_briefly(deadline)
        return (yield from self._exist(keys, deadline))

    def _exist(self, keys: Sequence[bytes], deadline: Deadline) -> Operation[list[bool]]:
        return self._flags(lambda part: Exists(list(part)), keys, deadline)

    def match_prefix(self, keys: Sequence[bytes], deadline: Deadline) -> Operation[int]:
        self._counters.add(requests=1)
        check_keys(keys)
        if self._early_puts.may_have(keys, self._hints):
            yield from self._early_puts.settle_briefly(deadline)
        matched = 0
        for part in cut(keys):
            count = yield from self._matched(part, deadline)
            matched += count
            if count < len(part):
                break
        return matched

    def _matched(self, keys: Sequence[bytes], deadline: Deadline) -> Operation[int]:
        """Leading keys of one message that are present. With several partitions each owner reports its keys, and the
        first gap counts."""
        if (yield from self._daemons.partitions(deadline)) == 1:
            return (yield from self._daemons.call_master(MatchPrefix(list(keys)), Count, deadline)).value
        flags = yield from self._exist(keys, deadline)
        return flags.index(False) if False in flags else len(flags)

    def remove(self, keys: Sequence[bytes], deadline: Deadline, *, force: bool) -> Operation[int]:
        self._counters.add(requests=1)
        check_keys(keys)
        keys = list(dict.fromkeys(keys))  # count each block once
        yield from self._early_puts.settle(deadline)
        self._hints.forget(keys)
        return sum((yield from self._flags(lambda part: Remove(list(part), int(force)), keys, deadline)))

    def remove_matching(self, namespace: str | None, pattern: str, deadline: Deadline, *, force: bool) -> Operation[int]:
        self._counters.add(requests=1)
        check_pattern(pattern)
        yield from self._early_puts.settle(deadline)
        message = RemoveMatching(namespace or "", int(namespace is None), pattern, int(force))
        counts = yield from for_all_partitions(
            self._daemons, deadline, lambda partition: self._daemons.call_master(message, Count, deadline, partition=partition)
        )
        return sum(count.value for count in counts)

    def pin(self, keys: Sequence[bytes], deadline: Deadline, *, pinned: bool, ttl_s: float | None = None) -> Operation[list[bool]]:
        self._counters.add(requests=1)
        check_keys(keys)
        if ttl_s is not None:
            check_ttl(ttl_s)
        yield from self._early_puts.settle(deadline)
        if ttl_s is None:
            return (yield from self._flags(lambda part: Pin(list(part), int(pinned)), keys, deadline))
        ttl_ms = math.ceil(ttl_s * 1000)
        return (yield from self._flags(lambda part: PinFor(list(part), ttl_ms), keys, deadline))

    def _flags(self, message: Callable[[Sequence[bytes]], Message], keys: Sequence[bytes], deadline: Deadline) -> Operation[list[bool]]:
        """Flag per key from messages about keys, split by the limit of one message."""

        def ask(partition: int, keys: Sequence[bytes]) -> Operation[list[bool]]:
            flags: list[bool] = []
            for part in cut(keys):
                reply = yield from self._daemons.call_master(message(part), Flags, deadline, partition=partition)
                flags += map(bool, reply.flags)
            return flags

        return by_partition(self._daemons, keys, deadline, ask)


def cut(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Split by the limit of one message; [] for no keys."""
    return [keys[start : start + MAX_BATCH] for start in range(0, len(keys), MAX_BATCH)]


FIRST_PAUSE_S: Final = 0.001
MAX_PAUSE_S: Final = 0.05
"""Pause between checks for the replicas; doubles from the first to the last."""
PAUSE_A_KEY_S: Final = 20e-6
"""Minimum pause per block in the request, so that large batches do not load the master."""


def replicate(daemons: ClusterConnections, keys: Sequence[bytes], count: int, deadline: Deadline, *, waits: bool) -> Operation[None]:
    """Set the replica target of committed blocks to `count`; with `waits`, wait until they have as many replicas.

    Raises Unavailable: fewer nodes accept blocks, or a block was evicted. The existing replicas stay, and the rest is
    copied once possible. Raises DeadlineExceeded: not all replicas exist yet; they will be made.
    """

    def ask(partition: int, keys: Sequence[bytes]) -> Operation[list[int]]:
        return list((yield from daemons.call_master(Replicate(list(keys), count), Flags, deadline, partition=partition)).flags)

    unique = list(dict.fromkeys(keys))
    for start in range(0, len(unique), MAX_BATCH):
        pending, pause_s = unique[start : start + MAX_BATCH], FIRST_PAUSE_S
        while pending:
            flags = yield from by_partition(daemons, pending, deadline, ask)
            if not waits:
                break
            if REPLICAS_NO_NODES in flags:
                raise Unavailable(f"fewer than {count} nodes accept blocks: the blocks are stored, and copied once there are as many")
            if REPLICAS_NO_BLOCK in flags:
                raise Unavailable("a block was evicted before it was copied: the cluster is too full for so many replicas")
            pending = [key for key, flag in zip(pending, flags, strict=True) if flag == REPLICAS_PENDING]
            if pending:
                yield SleepEffect(min(max(pause_s, len(pending) * PAUSE_A_KEY_S), deadline.left_s()))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
