"""Holds: what a client's lookups found stays where it is until it was loaded.

A `Hold` is a plain value that travels in an engine's messages. What the client has asked for in its name, at which nodes, is kept in
`HoldTable`, and so only the client that took a hold can release it. Blocks in the DRAM of this host are held through shared memory
(local/hold_lookup.py). Of the others the master says where they are, and each node is asked to hold its own: one round trip more than a
lookup without a hold. Sans-I/O: see effects.py.
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
"""Holds of one client that are neither released nor over; a lookup in the name of another one finds without holding."""
PURGED_AT_ONCE: Final = 8
"""Of the oldest holds, so many are looked at for their end whenever one is added."""


@dataclass(frozen=True, slots=True)
class Hold:
    """The name of a hold: a number that no other has, and how long each lookup may keep what it finds. Make one with `new_hold`, give it to
    lookups (`match_prefix(keys, hold=hold)`) and at last to `release`. It can be pickled and sent to other processes."""

    number: int
    duration_ms: int


def new_hold(hold_s: float) -> Hold:
    """A hold that has found nothing yet. Asks nobody. The node bounds its length, too (setting `max_lease_s`). Raises InvalidArgument."""
    check_hold(hold_s)
    return Hold((int.from_bytes(os.urandom(8), "little") >> 2) << 1, max(1, round(hold_s * 1000)))


def require_hold(hold: Hold | None, *, is_optional: bool = True) -> None:
    """Raises InvalidArgument unless `hold` is a Hold, or None where it is optional."""
    if not (hold is None and is_optional) and not isinstance(hold, Hold):
        raise InvalidArgument(f"hold is made by new_hold, not a {type(hold).__name__}")


@dataclass(slots=True)
class HoldTarget:
    """Where something may be held in one hold's name."""

    until_ns: int
    local: "set[LocalNode]" = field(default_factory=set)
    """Nodes of this host, by their shared memory."""
    nodes: set[int] = field(default_factory=set)
    """Nodes that were asked by message."""


class HoldTable:
    """The holds of one client. Thread-safe; bounded by MAX_HOLDS."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, HoldTarget] = OrderedDict()

    def extend(self, hold: Hold, now_ns: int) -> int | None:
        """Until when what is found now may be held. None: there are too many holds."""
        until_ns = now_ns + hold.duration_ms * 1_000_000
        with self._lock:
            kept = self._kept.get(hold.number)
            if kept is not None:
                kept.until_ns = max(kept.until_ns, until_ns)
                return until_ns
            self._purge(now_ns)
            if len(self._kept) >= MAX_HOLDS:
                return None
            self._kept[hold.number] = HoldTarget(until_ns)
        return until_ns

    def add_local(self, hold: Hold, node: "LocalNode") -> None:
        with self._lock:
            if (kept := self._kept.get(hold.number)) is not None:
                kept.local.add(node)

    def add_nodes(self, hold: Hold, nodes: Iterable[int]) -> None:
        with self._lock:
            if (kept := self._kept.get(hold.number)) is not None:
                kept.nodes.update(nodes)

    def take(self, hold: Hold) -> HoldTarget | None:
        """Forget a hold: where it is to be released. None: it is unknown, or was released."""
        with self._lock:
            return self._kept.pop(hold.number, None)

    def __len__(self) -> int:
        return len(self._kept)

    def _purge(self, now_ns: int) -> None:
        """Forget some that are over: each that is added takes the place of an older one that nobody released."""
        oldest = [number for number, _ in zip(self._kept, range(PURGED_AT_ONCE), strict=False)]
        for number in oldest:
            if self._kept[number].until_ns <= now_ns:
                del self._kept[number]
            else:
                self._kept.move_to_end(number)


RELEASE_S: Final = 1.0
"""A node that cannot be told so soon that a hold is over ends it at its time."""
BY_MESSAGE: Final = 1
"""Added to the number of a hold, which is even: what a node of this host holds by message is another hold there."""
MAX_TTL_MS: Final = (1 << 32) - 1


class HoldLookup:
    """See the module. Threads and tasks of a client share it."""

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
        """Which of the blocks can be read, and hold those; of a prefix only the ones before the first that cannot, and then nothing is said
        of those behind it. `nodes` of this host can be read in shared memory. What cannot be held is found all the same, and counted.

        Raises as Daemons.ask_master.
        """
        until_ns = self._table.extend(hold, now_ns)
        here = LocalHoldLookup(nodes, keys, lengths).hold(hold.number, until_ns, is_prefix=is_prefix)
        is_here = here.is_here
        for node in here.told:
            self._table.add_local(hold, node)
        if here.held or here.unheld:
            self._resources.counters.add(held_blocks=here.held, unheld_blocks=here.unheld)
        found: list[bool] = is_here.tolist()
        if not is_here.all():
            first = int(is_here.argmin())
            left = range(first, len(keys)) if is_prefix else [i for i, is_there in enumerate(found) if not is_there]
            rest = yield from self._elsewhere(
                [keys[i] for i in left], hold if until_ns is not None else None, deadline, is_prefix=is_prefix
            )
            for i, is_there in zip(left, rest, strict=True):
                found[i] = is_there
        return found

    def release(self, hold: Hold) -> Operation[None]:
        """End the hold at all nodes that have it, of which those that took it by message are told in the background. One that is over or
        unknown is ignored, and so is a node that cannot be told."""
        kept = self._table.take(hold)
        if kept is None:
            return
        for node in kept.local:
            node.desk.release(hold.number)
        if kept.nodes:
            with suppress(RuntimeError):  # the system has no thread for it: it ends at its time
                yield SpawnEffect(self._tell(kept.nodes, ReleaseHolds([hold.number + BY_MESSAGE])))

    def _tell(self, nodes: set[int], message: ReleaseHolds) -> Operation[None]:
        for node_id in nodes:
            node = self._daemons.nodes.get(node_id)
            if node is None:
                continue
            with suppress(KVStoreError):
                address = node.route.address()
                loan = yield AcquireConnectionEffect(address, Deadline(RELEASE_S), node.route.hello)
                with loan:
                    if node.route.is_meant(address, loan.channel.welcome):
                        yield SendOneWayEffect(loan.channel, message)

    def _elsewhere(self, keys: Sequence[bytes], hold: Hold | None, deadline: Deadline, *, is_prefix: bool) -> Operation[list[bool]]:
        """As `exist`, of blocks that are not in DRAM of this host."""
        resources = self._resources
        resources.counters.add(requests=1)
        if resources.early_puts.may_have(keys, resources.hints):
            yield from resources.early_puts.settle_soon(deadline)
        places = yield from ReplicaLookup(resources, keys, deadline).anew({0: list(range(len(keys)))})
        found = [False] * len(keys)
        for wanted in places.values():
            for i, _ in wanted:
                found[i] = True
        if hold is None:
            resources.counters.add(unheld_blocks=sum(found))
            return found
        limit = found.index(False) if is_prefix and False in found else len(found)
        self._table.add_nodes(hold, places)
        operations = [
            self._hold_at(node_id, part, keys, hold, deadline, found)
            for node_id, wanted in places.items()
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
        """Have one node hold blocks; what it does not have any more is no longer `found`. A node that does not answer holds nothing, and
        the load shows whether it has them."""
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
            loan, answer = yield from self._daemons.begin(node.route, message, Flags, share)
        except KVStoreError:
            counters.add(unheld_blocks=len(wanted))
            return
        loan.release()
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
    """Of one node, as many as a message takes."""
    return [wanted[start : start + MAX_BATCH] for start in range(0, len(wanted), MAX_BATCH)]
