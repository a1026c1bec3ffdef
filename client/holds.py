"""Holds: blocks that a lookup found stay where they are until they are loaded.

A `Hold` is a plain value that engines pass in messages. `HoldTable` records at which nodes it holds blocks, so only the
client that took a hold can release it. Blocks in DRAM of this host are held through shared memory
(local/hold_lookup.py). For others the master gives the locations and each node receives a hold request, one round trip
more than a plain lookup. Sans-I/O: see effects.py.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.client.connections.resources import ClientResources
from kvstore.client.core.arguments import check_hold
from kvstore.client.core.effects import AcquireConnectionEffect, GatherEffect, Operation, SendOneWayEffect, SpawnEffect
from kvstore.client.local.hold_lookup import LocalHoldLookup
from kvstore.client.local.nodes import LocalNode
from kvstore.client.reads.replica_lookup import ReplicaLookup, Wanted
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.node_messages import HOLD_GRANTED, HOLD_MISS, HoldBlocks, ReleaseHolds
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.deadline import Deadline

if TYPE_CHECKING:
    from kvstore.client.local.nodes import LocalNode


MAX_HOLDS: Final = 16_384
"""Active holds of one client; a lookup with a further hold finds without holding."""
PURGED_AT_ONCE: Final = 8
"""Oldest holds checked for expiry whenever one is added."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Name of a hold: a unique number, and how long each lookup may keep what it finds.

    Create one with `new_hold`, pass it to lookups (`match_prefix(keys, hold=hold)`), then to `release`. It can be
    pickled and sent to other processes.
    """

    number: int
    duration_ms: int


def new_hold(hold_s: float) -> Hold:
    """Create a hold without blocks. Sends nothing. Nodes bound its duration, too (setting `max_lease_s`). Raises
    InvalidArgument."""
    check_hold(hold_s)
    return Hold((int.from_bytes(os.urandom(8), "little") >> 2) << 1, max(1, round(hold_s * 1000)))


def require_hold(hold: Hold | None, *, is_optional: bool = True) -> None:
    """Raises InvalidArgument unless `hold` is a Hold, or None where it is optional."""
    if not (hold is None and is_optional) and not isinstance(hold, Hold):
        raise InvalidArgument(f"hold must be a Hold made by new_hold, not a {type(hold).__name__}")


@dataclass(slots=True)
class HoldTarget:
    """Nodes that hold blocks for one hold."""

    until_ns: int
    local: "set[LocalNode]" = field(default_factory=set)
    """Local nodes, held through shared memory."""
    nodes: set[int] = field(default_factory=set)
    """Ids of nodes that received a hold request."""


class HoldTable:
    """Active holds of one client. Thread-safe; bounded by MAX_HOLDS."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._targets: OrderedDict[int, HoldTarget] = OrderedDict()

    def extend(self, hold: Hold, now_ns: int) -> int | None:
        """Register the hold: the end of its new lease in ns, or None if there are too many holds."""
        until_ns = now_ns + hold.duration_ms * 1_000_000
        with self._lock:
            target = self._targets.get(hold.number)
            if target is not None:
                target.until_ns = max(target.until_ns, until_ns)
                return until_ns
            self._purge(now_ns)
            if len(self._targets) >= MAX_HOLDS:
                return None
            self._targets[hold.number] = HoldTarget(until_ns)
        return until_ns

    def add_local(self, hold: Hold, node: "LocalNode") -> None:
        with self._lock:
            if (target := self._targets.get(hold.number)) is not None:
                target.local.add(node)

    def add_nodes(self, hold: Hold, nodes: Iterable[int]) -> None:
        with self._lock:
            if (target := self._targets.get(hold.number)) is not None:
                target.nodes.update(nodes)

    def take(self, hold: Hold) -> HoldTarget | None:
        """Remove a hold: where to release it. None: unknown, or released already."""
        with self._lock:
            return self._targets.pop(hold.number, None)

    def __len__(self) -> int:
        return len(self._targets)

    def _purge(self, now_ns: int) -> None:
        """Remove some expired holds, so that unreleased ones do not accumulate."""
        oldest = [number for number, _ in zip(self._targets, range(PURGED_AT_ONCE), strict=False)]
        for number in oldest:
            if self._targets[number].until_ns <= now_ns:
                del self._targets[number]
            else:
                self._targets.move_to_end(number)


RELEASE_S: Final = 1.0
"""Deadline of a release request; without it the hold ends at its time."""
BY_MESSAGE: Final = 1
"""Added to the even number of a hold: a hold by message at a local node is distinct from that in shared memory."""
MAX_TTL_MS: Final = (1 << 32) - 1


class HoldLookup:
    """Lookups with a hold, and their release. Threads and tasks of a client share it."""

    def __init__(self, resources: ClientResources) -> None:
        self._resources = resources
        self._daemons = resources.daemons
        self._table = HoldTable()

    def exist(
        self,
        nodes: tuple[LocalNode, ...],
        keys: Sequence[bytes],
        lengths: set[int],
        hold: Hold,
        deadline: Deadline,
        *,
        now_ns: int,
        is_prefix: bool,
    ) -> Operation[list[bool]]:
        """Return which blocks are readable, holding them; with `is_prefix` only those before the first miss, and the rest is
        unspecified.

        `nodes` are the readable local nodes. Blocks that cannot be held are found nevertheless, and counted. Raises as
        `call_master`.
        """
        until_ns = self._table.extend(hold, now_ns)
        here = LocalHoldLookup(nodes, keys, lengths).hold(hold.number, until_ns, is_prefix=is_prefix)
        is_here = here.is_here
        for node in here.holding:
            self._table.add_local(hold, node)
        if here.held or here.unheld:
            self._resources.counters.add(held_blocks=here.held, unheld_blocks=here.unheld)
        found: list[bool] = is_here.tolist()
        if not is_here.all():
            first = int(is_here.argmin())
            left = range(first, len(keys)) if is_prefix else [i for i, is_there in enumerate(found) if not is_there]
            rest = yield from self._exist_remote(
                [keys[i] for i in left], hold if until_ns is not None else None, deadline, is_prefix=is_prefix
            )
            for i, is_there in zip(left, rest, strict=True):
                found[i] = is_there
        return found

    def release(self, hold: Hold) -> Operation[None]:
        """End the hold at all nodes; those that took it by message are notified in the background. Unknown holds and
        unreachable nodes are ignored."""
        target = self._table.take(hold)
        if target is None:
            return
        for node in target.local:
            node.reader_slots.release(hold.number)
        if target.nodes:
            with suppress(RuntimeError):  # no thread available: the hold ends at its time
                yield SpawnEffect(self._send_releases(target.nodes, ReleaseHolds([hold.number + BY_MESSAGE])))

    def _send_releases(self, nodes: set[int], message: ReleaseHolds) -> Operation[None]:
        for node_id in nodes:
            node = self._daemons.nodes.get(node_id)
            if node is None:
                continue
            with suppress(KVStoreError):
                address = node.route.address()
                connection = yield AcquireConnectionEffect(address, Deadline(RELEASE_S), node.route.hello)
                with connection:
                    if node.route.is_meant(address, connection.channel.welcome):
                        yield SendOneWayEffect(connection.channel, message)

    def _exist_remote(self, keys: Sequence[bytes], hold: Hold | None, deadline: Deadline, *, is_prefix: bool) -> Operation[list[bool]]:
        """`exist` for blocks that are not in local DRAM."""
        resources = self._resources
        resources.counters.add(requests=1)
        if resources.uncommitted_puts.may_have(keys, resources.hints):
            yield from resources.uncommitted_puts.settle_briefly(deadline)
        keys_by_node = yield from ReplicaLookup(resources, keys, deadline).find_again({0: list(range(len(keys)))})
        found = [False] * len(keys)
        for wanted in keys_by_node.values():
            for i, _ in wanted:
                found[i] = True
        if hold is None:
            resources.counters.add(unheld_blocks=sum(found))
            return found
        limit = found.index(False) if is_prefix and False in found else len(found)
        self._table.add_nodes(hold, keys_by_node)
        operations = [
            self._hold_at(node_id, part, keys, hold, deadline, found)
            for node_id, wanted in keys_by_node.items()
            for part in _parts([item for item in wanted if item[0] < limit])
        ]
        if len(operations) == 1:
            yield from operations[0]
        elif operations:
            yield GatherEffect(operations)
        return found

    def _hold_at(
        self, node_id: int, wanted: Sequence[Wanted], keys: Sequence[bytes], hold: Hold, deadline: Deadline, found: list[bool]
    ) -> Operation[None]:
        """Hold blocks at one node, and clear `found` for those it does not have. An unreachable node holds nothing; the
        load will show whether it has the blocks."""
        counters = self._resources.counters
        message = HoldBlocks(
            hold.number + BY_MESSAGE,
            min(hold.duration_ms, MAX_TTL_MS),
            [keys[i] for i, _ in wanted],
            [hint.generation for _, hint in wanted],
        )
        try:
            share = deadline.part(deadline.left_s() / 2)
            node = self._daemons.nodes.get(node_id) or (yield from self._daemons.find_node(node_id, share))
            if node is None:
                counters.add(unheld_blocks=len(wanted))
                return
            connection, answer = yield from self._daemons.begin(node.route, message, Flags, share)
        except KVStoreError:
            counters.add(unheld_blocks=len(wanted))
            return
        connection.release()
        if len(answer.flags) != len(wanted):
            counters.add(unheld_blocks=len(wanted))
            return
        for (i, _), flag in zip(wanted, answer.flags, strict=True):
            if flag == HOLD_MISS:
                found[i] = False
                self._resources.hints.forget([keys[i]])
        held, missing = answer.flags.count(HOLD_GRANTED), answer.flags.count(HOLD_MISS)
        counters.add(held_blocks=held, unheld_blocks=len(wanted) - held - missing)


def _parts(wanted: list[Wanted]) -> list[list[Wanted]]:
    """Split by the limit of one message."""
    return [wanted[start : start + MAX_BATCH] for start in range(0, len(wanted), MAX_BATCH)]
