"""Lookups that hold what they find, until it was loaded. Sans-I/O: see effects.py.

Blocks in the DRAM of this host are held through shared memory (local/hold_lookup.py). Of the others the master says where they are, and
each node is asked to hold its own: one round trip more than a lookup without a hold.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from kvstore.client.effects import Aside, Operation, Post, Take, Together
from kvstore.client.holds import Hold, HoldTable
from kvstore.client.local.hold_lookup import LocalHoldLookup
from kvstore.client.local.nodes import LocalNode
from kvstore.client.reads.finding import Finding, Wanted
from kvstore.client.resources import ClientResources
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.node_messages import HOLD_GRANTED, HOLD_MISS, HoldBlocks, ReleaseHolds
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.deadline import Deadline

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
                yield Aside(self._tell(kept.nodes, ReleaseHolds([hold.number + BY_MESSAGE])))

    def _tell(self, nodes: set[int], message: ReleaseHolds) -> Operation[None]:
        for node_id in nodes:
            node = self._daemons.nodes.get(node_id)
            if node is None:
                continue
            with suppress(KVStoreError):
                address = node.route.address()
                loan = yield Take(address, Deadline(RELEASE_S), node.route.hello)
                with loan:
                    if node.route.is_meant(address, loan.channel.welcome):
                        yield Post(loan.channel, message)

    def _elsewhere(self, keys: Sequence[bytes], hold: Hold | None, deadline: Deadline, *, is_prefix: bool) -> Operation[list[bool]]:
        """As `exist`, of blocks that are not in DRAM of this host."""
        resources = self._resources
        resources.counters.add(requests=1)
        if resources.early_puts.may_have(keys, resources.hints):
            yield from resources.early_puts.settle_soon(deadline)
        places = yield from Finding(resources, keys, deadline).anew({0: list(range(len(keys)))})
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
            yield Together(operations)
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
        loan.give_back()
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
