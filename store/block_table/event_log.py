"""What happened to blocks lately, for recorders: a bounded ring for each tenant that somebody records, and nothing for the others. And
which blocks are read most (access_counts.py), while somebody asks for that.

While nobody does either, a caller's only cost is a look at `is_recording`. While somebody does, it is one tuple a batch. A recorder that
asks too seldom loses the oldest events and is told how many: nobody waits for it. Pure; not thread-safe: the node's loop is the only
caller.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument, Unavailable
from kvstore.protocol.event_messages import MAX_ANSWER_EVENTS, READ, REMOVED, STORED, EventBatch, FetchEvents
from kvstore.store.block_table.access_counts import BlockReads, HotBlocks
from kvstore.store.block_table.block import Block

RING_EVENTS: Final = 131_072
"""Events (blocks) kept for each tenant: 50 MB where all of them are of blocks that are gone, and a second of the busiest node's."""
MAX_TENANTS: Final = 16
"""Tenants that are recorded at once, which bounds the memory of all rings."""


class _Event(NamedTuple):
    """`first` counts the tenant's events (blocks) before this one, and 1."""

    first: int
    kind: int
    time_us: int
    blocks: Sequence[Block]


class _Ring:
    """The newest events of one tenant, and who asks for them."""

    __slots__ = ("askers", "end", "events")

    def __init__(self) -> None:
        self.events: deque[_Event] = deque()
        self.end = 1
        self.askers: set[object] = set()

    def append(self, kind: int, time_us: int, blocks: Sequence[Block]) -> None:
        self.events.append(_Event(self.end, kind, time_us, blocks))
        self.end += len(blocks)
        while self.end - self.events[0].first > RING_EVENTS:
            self.events.popleft()

    def since(self, cursor: int, max_events: int) -> list[_Event]:
        """Whole events from `cursor` on: the first one, and more while all have no more than `max_events` blocks."""
        start = bisect_left(self.events, cursor, key=lambda event: event.first)
        found: list[_Event] = []
        for event in islice(self.events, start, None):
            max_events -= len(event.blocks)
            if found and max_events < 0:
                break
            found.append(event)
        return found


class BlockEventLog:
    """See the module. Give it only batches of blocks of one tenant."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        """`now_us` is the wall clock, in microseconds: recorders put several nodes' events into one order."""
        self._now_us = now_us
        self._rings: dict[str, _Ring] = {}
        self._hot = HotBlocks()
        self.is_recording = False
        """Whether anybody records or counts anything: look here before a batch is put together."""

    def stored(self, tenant: str, blocks: Sequence[Block]) -> None:
        """A client wrote these."""
        self._add(STORED, tenant, blocks)

    def read(self, tenant: str, blocks: Sequence[Block], *, is_far: bool) -> None:
        """A client was given these, in this order; one of another host where `is_far`."""
        if self._hot.is_counting:
            self._hot.read(blocks, is_far=is_far)
        self._add(READ, tenant, blocks)

    def missed(self, tenant: str, count: int) -> None:
        """Clients were given so many blocks more of which nothing is known: recorders are told that they lost them."""
        ring = self._rings.get(tenant)
        if ring is not None:
            ring.end += count

    def removed(self, block: Block) -> None:
        """The block's last copy leaves this node."""
        self._add(REMOVED, block.tenant, (block,))

    def _add(self, kind: int, tenant: str, blocks: Sequence[Block]) -> None:
        ring = self._rings.get(tenant)
        if ring is not None and blocks:
            ring.append(kind, self._now_us(), blocks)

    def answer(self, asker: object, tenant: str, message: FetchEvents) -> EventBatch:
        """What happened since. Raises InvalidArgument for a cursor that this asker was not given, Unavailable for a tenant too many."""
        ring = self._rings.get(tenant)
        if message.cursor == 0:
            ring = ring or self._begin(tenant)
            ring.askers.add(asker)
        elif ring is None or asker not in ring.askers or message.cursor > ring.end:
            raise InvalidArgument(f"cursor {message.cursor} is none of this connection's: begin with cursor 0")
        cursor = message.cursor or ring.end
        events = ring.since(cursor, min(message.max_events, MAX_ANSWER_EVENTS))
        blocks = [block for event in events for block in event.blocks]
        next_cursor = events[-1].first + len(events[-1].blocks) if events else ring.end
        return EventBatch(
            next_cursor=next_cursor,
            lost=next_cursor - cursor - len(blocks),
            kinds=bytes(event.kind for event in events),
            times_us=[event.time_us for event in events],
            blocks=[len(event.blocks) for event in events],
            keys=[block.key for block in blocks],
            sizes=[block.size_bytes for block in blocks],
            parents=[block.parent for block in blocks],
        )

    def _begin(self, tenant: str) -> _Ring:
        if len(self._rings) >= MAX_TENANTS:
            raise Unavailable(f"this node records for {MAX_TENANTS} tenants already: try again when one of them has ended")
        self._rings[tenant] = _Ring()
        self._look()
        return self._rings[tenant]

    def hottest(self, most: int, now_ns: int) -> list[BlockReads]:
        """See HotBlocks.told: who asks has reads counted from then on, and until nobody does for a while."""
        found = self._hot.told(most, now_ns)
        self._look()
        return found

    def _look(self) -> None:
        self.is_recording = bool(self._rings) or self._hot.is_counting

    def forget_asker(self, asker: object) -> None:
        """The connection is gone; what only it asked for is not recorded any more."""
        for ring in self._rings.values():
            ring.askers.discard(asker)
        self._rings = {tenant: ring for tenant, ring in self._rings.items() if ring.askers}
        self._look()
