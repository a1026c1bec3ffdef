"""Recent block events for recorders: a bounded ring for each recorded tenant. Also the entry to counting hot blocks
(access_counts.py).

Without recorders the cost is a test of `is_recording`, with them one tuple per batch. A recorder that polls too rarely
loses the oldest events and receives their number. Pure; not thread-safe: called from the node's loop.
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
"""Events (blocks) kept per tenant: 50 MB if all blocks are evicted, and one second of the busiest node."""
MAX_TENANTS: Final = 16
"""Tenants recorded at once; bounds the memory of all rings."""


class _Event(NamedTuple):
    """Event of a batch of blocks. `first` is the number of its first block in the tenant's stream, from 1."""

    first: int
    kind: int
    time_us: int
    blocks: Sequence[Block]


class _Ring:
    """Newest events of one tenant, and the recorders that poll them."""

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
        """Return whole events from `cursor` on: the first, and more up to `max_events` blocks in all."""
        start = bisect_left(self.events, cursor, key=lambda event: event.first)
        found: list[_Event] = []
        for event in islice(self.events, start, None):
            max_events -= len(event.blocks)
            if found and max_events < 0:
                break
            found.append(event)
        return found


class BlockEventLog:
    """Event rings by tenant. Each batch holds blocks of one tenant."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        """`now_us` is the wall clock, in microseconds: recorders merge the events of several nodes."""
        self._now_us = now_us
        self._rings: dict[str, _Ring] = {}
        self._hot = HotBlocks()
        self.local_reads = self.remote_reads = 0
        """Blocks given to clients of this host, and of other hosts."""
        self.is_recording = False
        """True if anything is recorded or counted. Test it before building a batch."""

    def stored(self, tenant: str, blocks: Sequence[Block]) -> None:
        """Record blocks that a client wrote."""
        self._add(STORED, tenant, blocks)

    def read(self, tenant: str, blocks: Sequence[Block], *, is_far: bool) -> None:
        """Record blocks given to a client, in order. `is_far`: a client of another host."""
        if is_far:
            self.remote_reads += len(blocks)
        else:
            self.local_reads += len(blocks)
        if self._hot.is_counting:
            self._hot.read(blocks, is_far=is_far)
        self._add(READ, tenant, blocks)

    def missed(self, tenant: str, count: int) -> None:
        """Record reads of this host whose blocks are unknown; recorders see them as lost."""
        self.local_reads += count
        ring = self._rings.get(tenant)
        if ring is not None:
            ring.end += count

    def removed(self, block: Block) -> None:
        """Record that the block's last copy is dropped from this node."""
        self._add(REMOVED, block.tenant, (block,))

    def _add(self, kind: int, tenant: str, blocks: Sequence[Block]) -> None:
        ring = self._rings.get(tenant)
        if ring is not None and blocks:
            ring.append(kind, self._now_us(), blocks)

    def answer(self, asker: object, tenant: str, message: FetchEvents) -> EventBatch:
        """Return the events since the cursor. Raises InvalidArgument for a cursor of another connection, Unavailable if
        too many tenants are recorded."""
        ring = self._rings.get(tenant)
        if message.cursor == 0:
            ring = ring or self._begin(tenant)
            ring.askers.add(asker)
        elif ring is None or asker not in ring.askers or message.cursor > ring.end:
            raise InvalidArgument(f"cursor {message.cursor} is not of this connection: begin with cursor 0")
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
            raise Unavailable(f"this node records events of {MAX_TENANTS} tenants already: try again later")
        self._rings[tenant] = _Ring()
        self._update_recording()
        return self._rings[tenant]

    def hottest(self, most: int, now_ns: int) -> list[BlockReads]:
        """Return the most read blocks; see `HotBlocks.hottest`. The call starts counting, which stops after a while
        without calls."""
        found = self._hot.hottest(most, now_ns)
        self._update_recording()
        return found

    def _update_recording(self) -> None:
        self.is_recording = bool(self._rings) or self._hot.is_counting

    def forget_asker(self, asker: object) -> None:
        """Remove a closed connection. Tenants without recorders are no longer recorded."""
        for ring in self._rings.values():
            ring.askers.discard(asker)
        self._rings = {tenant: ring for tenant, ring in self._rings.items() if ring.askers}
        self._update_recording()
