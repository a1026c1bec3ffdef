"""What a client asks the master without moving values: which blocks are there and where, and to remove or pin them. Sans-I/O: see
effects.py."""

import math
from collections.abc import Iterator, Sequence

from kvstore.client.arguments import check_keys, check_ttl
from kvstore.client.effects import Operation
from kvstore.client.locations import Location, tier_names
from kvstore.client.resources import ClientResources
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.master_messages import Exists, Locations, Lookup, MatchPrefix, Pin, PinFor, Remove, RemoveMatching, check_pattern
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Count, Flags
from kvstore.rpc.deadline import Deadline


class Questions:
    """All raise InvalidArgument for keys that are none, and as Daemons.ask_master. What this client put before and the cluster does not
    know yet is waited for: by removes and pins as long as it takes, by the others, if they ask for it, for a moment."""

    def __init__(self, resources: ClientResources) -> None:
        self._daemons = resources.daemons
        self._hints = resources.hints
        self._early_puts = resources.early_puts
        self._counters = resources.counters

    def ping(self, deadline: Deadline) -> Operation[None]:
        """Ask the owner about no block at all."""
        self._counters.add(requests=1)
        yield from self._daemons.ask_master(Exists([]), Flags, deadline)

    def locate(self, keys: Sequence[bytes], deadline: Deadline) -> Operation[list[list[Location]]]:
        self._counters.add(requests=1)
        check_keys(keys)
        if self._early_puts.may_have(keys, self._hints):
            yield from self._early_puts.settle_soon(deadline)
        found: list[list[Location]] = []
        for part in cut(keys):
            reply = yield from self._daemons.ask_master(Lookup(list(part)), Locations, deadline)
            if any(self._daemons.nodes.get(node_id) is None for node_id in reply.nodes):
                yield from self._daemons.refresh_nodes(deadline)
            found += self._locations(reply)
        return found

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
            yield from self._early_puts.settle_soon(deadline)
        return (yield from self._flags([Exists(list(part)) for part in cut(keys)], deadline))

    def match_prefix(self, keys: Sequence[bytes], deadline: Deadline) -> Operation[int]:
        self._counters.add(requests=1)
        check_keys(keys)
        if self._early_puts.may_have(keys, self._hints):
            yield from self._early_puts.settle_soon(deadline)
        matched = 0
        for part in cut(keys):
            count = (yield from self._daemons.ask_master(MatchPrefix(list(part)), Count, deadline)).value
            matched += count
            if count < len(part):
                break
        return matched

    def remove(self, keys: Sequence[bytes], deadline: Deadline, *, force: bool) -> Operation[int]:
        self._counters.add(requests=1)
        check_keys(keys)
        yield from self._early_puts.settle(deadline)
        self._hints.forget(keys)
        return sum((yield from self._flags([Remove(list(part), int(force)) for part in cut(keys)], deadline)))

    def remove_matching(self, namespace: str | None, pattern: str, deadline: Deadline, *, force: bool) -> Operation[int]:
        self._counters.add(requests=1)
        check_pattern(pattern)
        yield from self._early_puts.settle(deadline)
        message = RemoveMatching(namespace or "", int(namespace is None), pattern, int(force))
        return (yield from self._daemons.ask_master(message, Count, deadline)).value

    def pin(self, keys: Sequence[bytes], deadline: Deadline, *, pinned: bool, ttl_s: float | None = None) -> Operation[list[bool]]:
        self._counters.add(requests=1)
        check_keys(keys)
        if ttl_s is not None:
            check_ttl(ttl_s)
        yield from self._early_puts.settle(deadline)
        if ttl_s is None:
            return (yield from self._flags([Pin(list(part), int(pinned)) for part in cut(keys)], deadline))
        return (yield from self._flags([PinFor(list(part), math.ceil(ttl_s * 1000)) for part in cut(keys)], deadline))

    def _flags(self, messages: Sequence[Message], deadline: Deadline) -> Operation[list[bool]]:
        flags: list[bool] = []
        for message in messages:
            flags += map(bool, (yield from self._daemons.ask_master(message, Flags, deadline)).flags)
        return flags


def cut(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Parts that one message takes; none for no keys."""
    return [keys[start : start + MAX_BATCH] for start in range(0, len(keys), MAX_BATCH)]
