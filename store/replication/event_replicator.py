"""What the master must hear, in order: commits, blocks that are gone, moves between tiers; and the inventory after each registration.

It turns the table's events into Publish messages, keeps a few in flight, and calls back those who wait until the master has made
an event durable. Events for which nobody waits, of blocks that left say, wait a moment for others: in a full tier each put makes one, and
a message for each would wake up the master as often. While there is no link nothing is kept: the inventory that opens every link says it
all; of what the master knows already by digests (inventory_comparison.py), if that is much.

Events do not wait for the inventory, which takes a node of ten million blocks ten seconds: they go between its parts. A block is named as
it is by then, and one that is gone is not, so that whatever was said of it before holds after.
"""

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, NamedTuple

from kvstore.protocol.catalog_messages import (
    EVENT_COMMIT,
    EVENT_MOVED,
    EVENT_REMOVED,
    PHASE_STREAM,
    PHASE_SYNC,
    PHASE_SYNC_BEGIN,
    PHASE_SYNC_END,
    Publish,
)
from kvstore.protocol.errors import KVStoreError, Unavailable, typed
from kvstore.rpc.tracing import TraceSpan, call_within_spans
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.partitioning import Partitioning
from kvstore.store.block_table.rows import decided
from kvstore.store.block_table.uncommitted import SPARE, never
from kvstore.store.replication.inventory_comparison import InventoryComparison, Soon
from kvstore.store.replication.inventory_comparison import Send as Compare

Send = Callable[[Publish, Callable[[KVStoreError | None], None]], None]
"""Sends one message to the master and calls back once with None (durable) or the error."""

Published = Callable[[KVStoreError | None], None]

log = logging.getLogger("kvstore.store")

PART_BLOCKS: Final = 4_096
"""Of an inventory, looked at in one turn of the loop: 4 ms."""

Parts = Callable[[], Iterator[Sequence[Block]]]


class _Notice(NamedTuple):
    kind: int
    block: Block
    tier_mask: int
    """When it happened; said of a block that is gone by then."""


@dataclass(slots=True, eq=False)
class _Sent:
    """A message under way. With its answer and those of all before it every event up to `seq` is durable; 0 says nothing of events."""

    phase: int
    seq: int
    is_answered: bool = False


class _Waiter(NamedTuple):
    """For these events and all between them, of which the blocks' newest are some."""

    newest: int
    number: int
    oldest: int
    callback: Published
    blocks: Sequence[Block]
    is_over: Callable[[], bool]
    """Nobody needs the callback any more."""


class EventReplicator:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(
        self,
        parts: Callable[[], Iterator[Sequence[Block]]],
        *,
        batch_events: int,
        max_in_flight: int,
        later: Callable[[Callable[[], None]], object] | None = None,
        soon: Soon | None = None,
        compare_from_blocks: int = 1,
    ) -> None:
        """`parts` gives the blocks that the master is to know now, some at a time: the table may change until it is asked for the next.
        `later` calls its argument once the time is over that events wait for others, before a `flush`; None: they wait for none. `soon`
        calls it in a later turn of the loop; None: inventories are never compared. Nor are they where the master knows fewer than
        `compare_from_blocks`."""
        self._compare_from_blocks = compare_from_blocks
        self._soon = soon
        self._comparison: InventoryComparison | None = None
        """While it is under way it is not known which blocks are to be named."""
        self._parts = parts
        self._later = later
        self._is_due = False
        self._is_timed = False
        """`later` has been asked, and has not called yet."""
        self._batch_events = batch_events
        self._max_in_flight = max_in_flight
        self._send: Send | None = None
        self._epoch = 0
        self._link = 0
        self._seq = 0
        self.durable_seq = 0
        """The newest event up to which all are durable."""
        self._streamed_seq = 0
        """Of this link, until its inventory is durable: the newest event up to which all since its beginning are."""
        self._queue: deque[_Notice] = deque()
        self._inventory: Iterator[Block] | None = None
        self._inventory_seq = 0
        """The inventory says all up to this event."""
        self._is_inventorys_turn = False
        self._is_synced = False
        self._in_flight: deque[_Sent] = deque()
        self._on_synced: Callable[[], None] = lambda: None
        self._waiters: list[_Waiter] = []
        """A heap."""
        self._max_waiters = SPARE
        self._next_waiter = 0
        self._unsaid_gone: dict[tuple[str, bytes], int] = {}
        """By tenant and key, the newest event in the queue that says that a block of it is gone."""
        self._causes: list[tuple[int, TraceSpan]] = []
        """Traced requests that wait for events which are not said yet, by these events."""
        self.on_refused: Callable[[KVStoreError], None] = lambda error: None
        """Called when the master refuses a message, or a part of the inventory is lost: the link must be made anew."""

    @property
    def is_synced(self) -> bool:
        """The master has the inventory of this link, and everything since up to the last few events."""
        return self._is_synced

    @property
    def has_said_all(self) -> bool:
        """Every event of this link until now is on its way to the master: what is sent to it now comes behind them."""
        return self._send is not None and not self._queue

    @property
    def backlog(self) -> int:
        """Events that the master has not made durable yet."""
        return self._seq - self.durable_seq

    def emit(self, kind: int, block: Block) -> None:
        """The table's `emit`. What moves before the inventory has named it is named: the master may not know what it was that moved. What
        moves while something is still to be said of it is not said once more: what is said is where it is by then. So a master that takes
        nothing for an hour has no node grow by each move."""
        if kind == EVENT_MOVED and self._seq - len(self._queue) < block.event_seq <= self._seq:
            return
        self._seq += 1
        block.event_seq = self._seq
        if kind == EVENT_MOVED and not self._is_synced:
            kind = EVENT_COMMIT
        if self._send is not None:
            self._queue.append(_Notice(kind, block, block.tier_mask()))
            if kind == EVENT_REMOVED:
                self._unsaid_gone[block.tenant, block.key] = self._seq

    def is_published(self, newest: int, oldest: int) -> bool:
        """These events, and all between them, are durable at the master."""
        return newest <= self.durable_seq or self._inventory_seq < oldest <= newest <= self._streamed_seq

    def when_published(
        self,
        newest: int,
        callback: Published,
        span: TraceSpan | None = None,
        *,
        oldest: int | None = None,
        blocks: Sequence[Block] = (),
        is_over: Callable[[], bool] = never,
    ) -> None:
        """Call back when the event `newest`, and all from `oldest` on where there are others, are durable at the master: at once if they
        are, however long it takes if not. `span`: of the request that waits, if it is traced. `blocks`: those that it waits for, which are
        said again at once over the next link; without, the whole inventory of that comes first. Who waits is forgotten some time after
        `is_over` says that nobody does any more."""
        oldest = newest if oldest is None else oldest
        if self.is_published(newest, oldest):
            callback(None)
            return
        if len(self._waiters) >= self._max_waiters:
            self._forget_over()
        heapq.heappush(self._waiters, _Waiter(newest, self._next_waiter, oldest, callback, blocks, is_over))
        self._next_waiter += 1
        if span is not None:
            span.begin("kvstore.node.wait_for_master")
            if self._send is not None and newest > self._seq - len(self._queue):
                self._causes.append((newest, span))

    def link_up(
        self, send: Send, epoch: int, on_synced: Callable[[], None], *, compare: Compare | None = None, known_blocks: int = 0
    ) -> None:
        """There is a new link, under this registration: tell it the whole inventory, and `on_synced` when it has it. The master thinks that
        `known_blocks` are here; `compare` tells it digests."""
        self.link_down()
        self._on_synced = on_synced
        self._send, self._epoch = send, epoch
        parts = self._parts()
        self._inventory = chain.from_iterable(parts)
        self._inventory_seq = self._streamed_seq = self._seq
        self._is_inventorys_turn = False
        self._say(PHASE_SYNC_BEGIN, [], 0)
        self._say_anew()
        if self._compare_from_blocks <= known_blocks and compare is not None and self._soon is not None and self._send is not None:
            self._comparison = InventoryComparison(
                parts, epoch=epoch, send=compare, soon=self._soon, then=self._compared, max_blocks=2 * known_blocks
            )
        self.flush()

    def _say_anew(self) -> None:
        """Commit once more what somebody waits for who was told nothing by the link before: he need not wait for the inventory."""
        self._forget_over()
        waiters, self._waiters, before = self._waiters, [], self._seq
        for waiter in waiters:
            there = [block for block in waiter.blocks if not block.is_gone]
            for block in there:
                if block.event_seq <= before:  # else another one waits for it, too
                    self.emit(EVENT_COMMIT, block)
            said = [block.event_seq for block in there]
            self._waiters.append(waiter._replace(newest=max(said), oldest=min(said)) if said else waiter)
        heapq.heapify(self._waiters)

    def _forget_over(self) -> None:
        """Those that nobody needs any more."""
        self._waiters = [waiter for waiter in self._waiters if not waiter.is_over()]
        heapq.heapify(self._waiters)
        self._max_waiters = 2 * len(self._waiters) + SPARE

    def _compared(self, differing: list[Block] | KVStoreError | None) -> None:
        self._comparison = None
        if isinstance(differing, KVStoreError):
            self._begin_anew(differing)
        else:
            self._inventory = iter(differing) if differing is not None else self._all()
            self.flush()

    def _all(self) -> Iterator[Block]:
        """The blocks that the master is to know by the time that the first is asked for."""
        for part in self._parts():
            yield from part

    def _begin_anew(self, error: KVStoreError) -> None:
        self.link_down()
        self.on_refused(error)

    def link_down(self) -> None:
        """The link broke. Answers that still come from it are ignored; who waits goes on waiting for the next link."""
        self._send = None
        self._link += 1
        if self._comparison is not None:
            self._comparison.end()
            self._comparison = None
        self._in_flight.clear()
        self._queue.clear()
        self._unsaid_gone.clear()
        self._causes.clear()
        self._inventory = None
        self._streamed_seq = 0
        self._is_synced = False

    def flush(self) -> None:
        """Send what there is, if its time has come, as far as the window allows. Called after every round of events: batches form by
        themselves."""
        if self._may_wait():
            if not self._is_timed and self._later is not None:
                self._is_timed = True
                self._later(self._come_due)
        else:
            self.flush_now()

    def _may_wait(self) -> bool:
        """Nobody waits for what there is to say, and there is not much of it."""
        is_urgent = self._is_due or self._has_parts or bool(self._waiters) or len(self._queue) >= self._batch_events
        return self._later is not None and not is_urgent and bool(self._queue)

    def _come_due(self) -> None:
        self._is_timed = False
        self._is_due = True

    @property
    def _has_parts(self) -> bool:
        """There is a part of the inventory to be said."""
        return self._inventory is not None and self._comparison is None

    def flush_now(self) -> None:
        """Send what there is, as far as the window allows: events and parts of the inventory by turns."""
        while self._send is not None and len(self._in_flight) < self._max_in_flight:
            if self._has_parts and (self._is_inventorys_turn or not self._queue):
                self._wholly(self._say_inventory)
                self._is_inventorys_turn = False
            elif self._queue:
                self._wholly(self._say_events)
                self._is_inventorys_turn = True
            else:
                self._is_due = False
                return

    def say_gone(self, blocks: Sequence[Block]) -> None:
        """Send what there is, as `flush_now`; and whatever the window, if it is still to be said that former blocks of these keys are
        gone."""
        self.flush_now()
        while self._unsaid_gone and not self._unsaid_gone.keys().isdisjoint((block.tenant, block.key) for block in blocks):
            self._wholly(self._say_events)

    def _wholly(self, say: Callable[[], None]) -> None:
        """Say a message, or have the link made anew: what was taken for one that could not be said would be said by none."""
        try:
            say()
        except Exception as error:
            log.exception("what the node holds could not be said")
            self._begin_anew(typed(error))

    def _say_events(self) -> None:
        first = self._seq - len(self._queue) + 1
        events = [self._queue.popleft() for _ in range(min(len(self._queue), self._batch_events))]
        for seq, (kind, block, _tier_mask) in enumerate(events if self._unsaid_gone else (), first):
            if kind == EVENT_REMOVED and self._unsaid_gone[block.tenant, block.key] == seq:
                del self._unsaid_gone[block.tenant, block.key]
        self._say(PHASE_STREAM, events, self._seq - len(self._queue))

    def _say_inventory(self) -> None:
        assert self._inventory is not None
        found = list(islice(self._inventory, self._batch_events))
        if found:
            events = [_Notice(EVENT_COMMIT, block, block.tier_mask()) for block in found if not block.is_gone]
            self._say(PHASE_SYNC, events, 0)
        else:
            self._inventory = None
            self._say(PHASE_SYNC_END, [], self._inventory_seq)

    def _say(self, phase: int, events: list[_Notice], seq: int) -> None:
        assert self._send is not None
        link, sent = self._link, _Sent(phase, seq)
        self._in_flight.append(sent)

        def answered(error: KVStoreError | None) -> None:
            if link != self._link:
                return
            if error is not None:
                self._begin_anew(error)
                return
            sent.is_answered = True
            self._advance()
            self.flush()

        call_within_spans(self._said_for(seq) if self._causes else (), self._send, _message(self._epoch, phase, events), answered)

    def _said_for(self, seq: int) -> list[TraceSpan]:
        """The traced requests that wait for events up to that one; each is given once."""
        found = [span for awaited_seq, span in self._causes if awaited_seq <= seq]
        self._causes = [cause for cause in self._causes if cause[0] > seq]
        return found

    def _advance(self) -> None:
        """Take in the answers that came, in the order of the messages: one may be answered before its predecessor is durable."""
        while self._in_flight and self._in_flight[0].is_answered:
            sent = self._in_flight.popleft()
            self._streamed_seq = max(self._streamed_seq, sent.seq)
            is_synced_now = sent.phase == PHASE_SYNC_END
            self._is_synced |= is_synced_now
            if self._is_synced:
                self.durable_seq = max(self.durable_seq, self._streamed_seq)
            if is_synced_now:
                self._on_synced()
        while self._waiters and self._waiters[0].newest <= self.durable_seq:
            heapq.heappop(self._waiters).callback(None)
        if not self._is_synced:
            self._tell_of_streamed()

    def _tell_of_streamed(self) -> None:
        """Before the inventory is durable: who waits for events since its beginning only."""
        told = sorted(waiter for waiter in self._waiters if self.is_published(waiter.newest, waiter.oldest))
        if told:
            self._waiters = [waiter for waiter in self._waiters if not self.is_published(waiter.newest, waiter.oldest)]
            heapq.heapify(self._waiters)
        for waiter in told:
            waiter.callback(None)

    def close(self) -> None:
        """Nothing more will be published: who waits is told."""
        self.link_down()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.callback(Unavailable("the node stops before the master has made this durable; try again"))


def _message(epoch: int, phase: int, events: list[_Notice]) -> Publish:
    tenants: dict[str, int] = {}
    namespaces: dict[str, int] = {}
    blocks = [event.block for event in events]
    return Publish(
        epoch=epoch,
        phase=phase,
        tenant_indexes=[tenants.setdefault(block.tenant, len(tenants)) for block in blocks],
        namespace_indexes=[namespaces.setdefault(block.namespace, len(namespaces)) for block in blocks],
        tenants=list(tenants),
        namespaces=list(namespaces),
        keys=[block.key for block in blocks],
        kinds=bytes(event.kind for event in events),
        sizes=[block.size_bytes for block in blocks],
        checksums=[block.checksum for block in blocks],
        generations=[block.generation for block in blocks],
        tiers=bytes(event.block.tier_mask() or event.tier_mask for event in events),
        parents=[block.parent for block in blocks],
    )


Make = Callable[[Parts], EventReplicator]
"""Makes the publisher of the blocks that are told, in parts, when asked for."""


class EventReplicators:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(self, blocks: Callable[[], Iterable[Block]], partitioning: Partitioning, make: Make) -> None:
        """`blocks` gives all visible ones. What the master has not decided about is claimed, and in no inventory."""
        self._blocks = blocks
        self._partitioning = partitioning
        self._make = make
        self._each = [make(self._of(0))]

    def __getitem__(self, partition: int) -> EventReplicator:
        return self._each[partition]

    def cut(self) -> None:
        """The partitions are known: nothing has been said yet, so that nobody waits for what has changed its publisher. What moved before
        had a number of the first publisher's, which says nothing at its own."""
        if len(self._each) < self._partitioning.count:
            for block in self._blocks():
                if block.event_seq and self._partitioning.of(block.key):
                    block.event_seq = 0
        self._each += [self._make(self._of(partition)) for partition in range(len(self._each), self._partitioning.count)]

    def _of(self, partition: int) -> Parts:
        of = self._partitioning.of

        def parts(blocks: list[Block]) -> Iterator[Sequence[Block]]:
            for begin in range(0, len(blocks), PART_BLOCKS):
                part = decided(blocks[begin : begin + PART_BLOCKS])
                yield part if self._partitioning.count == 1 else [block for block in part if of(block.key) == partition]

        return lambda: parts(list(self._blocks()))

    def emit(self, kind: int, block: Block) -> None:
        """The table's `emit`."""
        self._each[self._partitioning.of(block.key)].emit(kind, block)

    def when_published(
        self, blocks: Sequence[Block], callback: Published, span: TraceSpan | None = None, *, is_over: Callable[[], bool] = never
    ) -> None:
        """Call back when the newest events of these blocks are durable at their masters; at once if they are. See
        Publisher.when_published."""
        groups = self._partitioning.group(blocks)
        answers: list[KVStoreError | None] = []

        def told(error: KVStoreError | None) -> None:
            answers.append(error)
            if len(answers) == len(groups):
                callback(next(filter(None, answers), None))

        for partition, group in groups.items():
            publisher = self._each[partition]
            awaited = [block for block in group if block.event_seq > publisher.durable_seq]
            events = [block.event_seq for block in awaited]
            publisher.when_published(max(events, default=0), told, span, oldest=min(events, default=0), blocks=awaited, is_over=is_over)
        if not groups:
            callback(None)

    def are_published(self, blocks: Sequence[Block]) -> bool:
        """The newest events of these blocks are durable at their masters."""
        return all(self._each[self._partitioning.of(block.key)].is_published(block.event_seq, block.event_seq) for block in blocks)

    @property
    def is_synced(self) -> bool:
        """Every partition's master has the inventory of its link."""
        return all(one.is_synced for one in self._each)

    @property
    def backlog(self) -> int:
        """Events that masters have not made durable yet."""
        return sum(one.backlog for one in self._each)

    def flush(self) -> None:
        for one in self._each:
            one.flush()

    def flush_now(self) -> None:
        for one in self._each:
            one.flush_now()

    def close(self) -> None:
        """Nothing more will be published: who waits is told."""
        for one in self._each:
            one.close()
