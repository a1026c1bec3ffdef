"""Replication of the node's block events to the master, in order: commits, evictions, moves between tiers.

`EventReplicator` turns the table's events into `Publish` messages, keeps a bounded number in flight, and notifies
waiters once the master has made an event durable. After each registration it sends the node's inventory: in full, or
only the differences that digests show (inventory_comparison.py).

- Without a link no event is queued. The inventory that starts the next link covers them.
- Events that no request waits for are delayed, so that several share a message. In a full tier every put evicts a
  block; one message per eviction would wake the master as often.
- Events are interleaved with parts of the inventory, which takes 10 s for ten million blocks. An inventory part carries
  a block's state at the time of sending and skips evicted blocks, so earlier events stay valid.
"""

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.block_table.rows import decided
from kvstore.store.block_table.uncommitted import FORGET_EVERY, never
from kvstore.store.replication.inventory_comparison import InventoryComparison, Soon
from kvstore.store.replication.inventory_comparison import SendDigests as Compare

SendEvents = Callable[[Publish, Callable[[KVStoreError | None], None]], None]
"""Sends one message to the master. Calls back once: None when it is durable, else the error."""

Published = Callable[[KVStoreError | None], None]

log = logging.getLogger("kvstore.store")

PART_BLOCKS: Final = 4_096
"""Inventory blocks read at once: 4 ms."""
PARTS_PER_MESSAGE: Final = 4
"""Parts read for one message of the inventory. One of 64 partitions has 64 blocks of a part: a full message would take a
quarter of a million blocks, 100 ms."""

Parts = Callable[[], Iterator[Sequence[Block]]]


class _Notice(NamedTuple):
    kind: int
    block: Block
    tier_mask: int
    """The block's tiers at the time of the event; sent if the block has been evicted since."""


@dataclass(slots=True, eq=False)
class _Sent:
    """Message in flight. Once it and all earlier ones are answered, every event up to `seq` is durable. `seq` is 0 for
    a message without events."""

    phase: int
    seq: int
    is_answered: bool = False


class _Waiter(NamedTuple):
    """Callback for the events `oldest` to `newest`. A heap orders waiters by `newest`."""

    newest: int
    number: int
    oldest: int
    callback: Published
    blocks: Sequence[Block]
    is_over: Callable[[], bool]
    """True once the callback is no longer needed."""


class EventReplicator:
    """Event stream to the master of one partition. Not thread-safe: called from the node's loop."""

    def __init__(
        self,
        parts: Callable[[], Iterator[Sequence[Block]]],
        *,
        batch_events: int,
        max_in_flight: int,
        later: Callable[[Callable[[], None]], object] | None = None,
        soon: Soon | None = None,
        compare_from_blocks: int = 1,
        prompts: Callable[[Iterable[Block]], bytes] | None = None,
    ) -> None:
        """Create a replicator without a link.

        - `parts` iterates over the blocks of the inventory, in parts. The table may change between two parts.
        - `later` schedules its argument after the batching delay. None: events are sent at once.
        - `soon` schedules its argument in a later loop iteration. None: inventories are always sent in full.
        - `prompts` returns the groups of committed blocks (prompt_groups.py).
        - `compare_from_blocks`: digests are compared only if the master knows at least this many blocks.
        """
        self._compare_from_blocks = compare_from_blocks
        self._prompts = prompts
        self._soon = soon
        self._comparison: InventoryComparison | None = None
        """While it runs, the blocks to send are not known yet."""
        self._parts = parts
        self._later = later
        self._is_due = False
        self._is_timed = False
        """`later` has been called and has not fired yet."""
        self._batch_events = batch_events
        self._max_in_flight = max_in_flight
        self._send: SendEvents | None = None
        self._epoch = 0
        self._link = 0
        self._seq = 0
        self.durable_seq = 0
        """Newest event such that it and all earlier ones are durable."""
        self._streamed_seq = 0
        """Newest durable event of this link, until its inventory is durable."""
        self._queue: deque[_Notice] = deque()
        self._inventory: Iterator[Sequence[Block]] | None = None
        self._unsent: list[Block] = []
        """Blocks read from it."""
        self._inventory_seq = 0
        """The inventory covers all events up to this one."""
        self._is_inventory_next = False
        self._is_synced = False
        self._in_flight: deque[_Sent] = deque()
        self._on_synced: Callable[[], None] = lambda: None
        self._waiters: list[_Waiter] = []
        self._max_waiters = FORGET_EVERY
        self._next_waiter = 0
        self._unsent_evictions: dict[tuple[str, bytes], int] = {}
        """Newest queued EVENT_REMOVED by tenant and key."""
        self._causes: list[tuple[int, TraceSpan]] = []
        """Traced requests that wait for unsent events, with the event."""
        self.on_refused: Callable[[KVStoreError], None] = lambda error: None
        """Called when the master refuses a message, or part of the inventory is lost. The caller reconnects."""

    @property
    def is_synced(self) -> bool:
        """True if the master has the inventory of this link and all events since, except the last few."""
        return self._is_synced

    @property
    def has_sent_all(self) -> bool:
        """True if every event of this link has been sent, so that later messages arrive behind them."""
        return self._send is not None and not self._queue

    @property
    def backlog(self) -> int:
        """Number of events that are not durable at the master."""
        return self._seq - self.durable_seq

    def emit(self, kind: int, block: Block) -> None:
        """Queue an event of the block table.

        A move is reported as a commit until the inventory is durable, because the master may not know the block. A move
        of a block that already has a queued event adds none: the queued one reports the tiers at the time of sending.
        So the queue stays bounded by blocks while the master accepts nothing.
        """
        if kind == EVENT_MOVED and self._seq - len(self._queue) < block.event_seq <= self._seq:
            return
        self._seq += 1
        block.event_seq = self._seq
        if kind == EVENT_MOVED and not self._is_synced:
            kind = EVENT_COMMIT
        if self._send is not None:
            self._queue.append(_Notice(kind, block, block.tier_mask()))
            if kind == EVENT_REMOVED:
                self._unsent_evictions[block.tenant, block.key] = self._seq

    def is_published(self, newest: int, oldest: int) -> bool:
        """Return True if these events, and all between them, are durable at the master."""
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
        """Call back once the events `oldest` to `newest` are durable at the master; at once if they are.

        `blocks` are committed first on the next link; without them the waiter waits for the whole inventory. `span` is
        that of a traced request. A waiter is dropped some time after `is_over` returns True.
        """
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
        self, send: SendEvents, epoch: int, on_synced: Callable[[], None], *, compare: Compare | None = None, known_blocks: int = 0
    ) -> None:
        """Start sending over a new link: first the inventory, then call `on_synced` when it is durable.

        `epoch` is the registration's, `known_blocks` the number of this node's blocks that the master has. `compare`
        sends digests.
        """
        self.link_down()
        self._on_synced = on_synced
        self._send, self._epoch = send, epoch
        parts = self._parts()
        self._inventory = parts
        self._inventory_seq = self._streamed_seq = self._seq
        self._is_inventory_next = False
        self._send_message(PHASE_SYNC_BEGIN, [], 0)
        self._recommit_awaited()
        if self._compare_from_blocks <= known_blocks and compare is not None and self._soon is not None and self._send is not None:
            self._comparison = InventoryComparison(
                parts, epoch=epoch, send=compare, soon=self._soon, then=self._compared, max_blocks=2 * known_blocks
            )
        self.flush()

    def _recommit_awaited(self) -> None:
        """Commit awaited blocks first, so that their waiters do not wait for the whole inventory."""
        self._forget_over()
        waiters, self._waiters, before = self._waiters, [], self._seq
        for waiter in waiters:
            there = [block for block in waiter.blocks if not block.is_dropped]
            for block in there:
                if block.event_seq <= before:  # else an earlier waiter has emitted it
                    self.emit(EVENT_COMMIT, block)
            said = [block.event_seq for block in there]
            self._waiters.append(waiter._replace(newest=max(said), oldest=min(said)) if said else waiter)
        heapq.heapify(self._waiters)

    def _forget_over(self) -> None:
        self._waiters = [waiter for waiter in self._waiters if not waiter.is_over()]
        heapq.heapify(self._waiters)
        self._max_waiters = 2 * len(self._waiters) + FORGET_EVERY

    def _compared(self, differing: list[Block] | KVStoreError | None) -> None:
        self._comparison = None
        if isinstance(differing, KVStoreError):
            self._reconnect(differing)
        else:
            self._inventory = _parts_of(differing) if differing is not None else self._all()
            self.flush()

    def _all(self) -> Iterator[Sequence[Block]]:
        """Iterate over the inventory as it is when the first part is requested."""
        yield from self._parts()

    def _reconnect(self, error: KVStoreError) -> None:
        self.link_down()
        self.on_refused(error)

    def link_down(self) -> None:
        """End the link. Late answers are ignored; waiters stay for the next link."""
        self._send = None
        self._link += 1
        if self._comparison is not None:
            self._comparison.end()
            self._comparison = None
        self._in_flight.clear()
        self._queue.clear()
        self._unsent_evictions.clear()
        self._causes.clear()
        self._inventory, self._unsent = None, []
        self._streamed_seq = 0
        self._is_synced = False

    def flush(self) -> None:
        """Send queued events if they are due, as far as the window allows. Called after each round of events, which
        forms batches."""
        if self._may_wait():
            if not self._is_timed and self._later is not None:
                self._is_timed = True
                self._later(self._become_due)
        else:
            self.flush_now()

    def _may_wait(self) -> bool:
        """Return True if no request waits for the queued events and they do not fill a batch."""
        is_urgent = self._is_due or self._has_parts or bool(self._waiters) or len(self._queue) >= self._batch_events
        return self._later is not None and not is_urgent and bool(self._queue)

    def _become_due(self) -> None:
        self._is_timed = False
        self._is_due = True

    @property
    def _has_parts(self) -> bool:
        return self._inventory is not None and self._comparison is None

    def flush_now(self) -> None:
        """Send queued events and inventory parts in turn, as far as the window allows."""
        while self._send is not None and len(self._in_flight) < self._max_in_flight:
            if self._has_parts and (self._is_inventory_next or not self._queue):
                self._send_or_reconnect(self._send_inventory_part)
                self._is_inventory_next = False
            elif self._queue:
                self._send_or_reconnect(self._send_events)
                self._is_inventory_next = True
            else:
                self._is_due = False
                return

    def send_evictions(self, blocks: Sequence[Block]) -> None:
        """Send everything that the window allows; send an unsent EVENT_REMOVED of these keys regardless of the window."""
        self.flush_now()
        while self._unsent_evictions and not self._unsent_evictions.keys().isdisjoint((block.tenant, block.key) for block in blocks):
            self._send_or_reconnect(self._send_events)

    def _send_or_reconnect(self, say: Callable[[], None]) -> None:
        """Send a message; on an exception reconnect, because its events would otherwise be lost."""
        try:
            say()
        except Exception as error:
            log.exception("sending events to the master failed; reconnecting")
            self._reconnect(typed(error))

    def _send_events(self) -> None:
        first = self._seq - len(self._queue) + 1
        events = [self._queue.popleft() for _ in range(min(len(self._queue), self._batch_events))]
        for seq, (kind, block, _tier_mask) in enumerate(events if self._unsent_evictions else (), first):
            if kind == EVENT_REMOVED and self._unsent_evictions[block.tenant, block.key] == seq:
                del self._unsent_evictions[block.tenant, block.key]
        self._send_message(PHASE_STREAM, events, self._seq - len(self._queue))

    def _send_inventory_part(self) -> None:
        assert self._inventory is not None
        found, parts = self._unsent, 0
        while len(found) < self._batch_events and parts < PARTS_PER_MESSAGE and (part := next(self._inventory, None)) is not None:
            found += part
            parts += 1
        if found or parts:
            events = [_Notice(EVENT_COMMIT, block, block.tier_mask()) for block in found[: self._batch_events] if not block.is_dropped]
            del found[: self._batch_events]
            self._send_message(PHASE_SYNC, events, 0)
        else:
            self._inventory = None
            self._send_message(PHASE_SYNC_END, [], self._inventory_seq)

    def _send_message(self, phase: int, events: list[_Notice], seq: int) -> None:
        assert self._send is not None
        link, sent = self._link, _Sent(phase, seq)
        self._in_flight.append(sent)

        def answered(error: KVStoreError | None) -> None:
            if link != self._link:
                return
            if error is not None:
                self._reconnect(error)
                return
            sent.is_answered = True
            self._advance()
            self.flush()

        message = _message(self._epoch, phase, events)
        if self._prompts is not None and phase == PHASE_STREAM and EVENT_COMMIT in message.kinds:
            message.prompts = self._prompts(event.block for event in events)
        call_within_spans(self._take_causes(seq) if self._causes else (), self._send, message, answered)

    def _take_causes(self, seq: int) -> list[TraceSpan]:
        """Return the traced requests that wait for events up to `seq`, each once."""
        found = [span for awaited_seq, span in self._causes if awaited_seq <= seq]
        self._causes = [cause for cause in self._causes if cause[0] > seq]
        return found

    def _advance(self) -> None:
        """Process answers in the order of the messages: one may be answered before its predecessor is durable."""
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
            self._notify_streamed()

    def _notify_streamed(self) -> None:
        """Notify waiters whose events are all of this link, before its inventory is durable."""
        told = sorted(waiter for waiter in self._waiters if self.is_published(waiter.newest, waiter.oldest))
        if told:
            self._waiters = [waiter for waiter in self._waiters if not self.is_published(waiter.newest, waiter.oldest)]
            heapq.heapify(self._waiters)
        for waiter in told:
            waiter.callback(None)

    def close(self) -> None:
        """End the link and fail all waiters with Unavailable."""
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


def _parts_of(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    return (blocks[begin : begin + PART_BLOCKS] for begin in range(0, len(blocks), PART_BLOCKS))


Make = Callable[[Parts], EventReplicator]
"""Makes the replicator of one partition, given its inventory."""


class EventReplicators:
    """The replicators of all partitions. Not thread-safe: called from the node's loop."""

    def __init__(self, blocks: Callable[[], Iterable[Block]], partition_map: PartitionMap, make: Make) -> None:
        """`blocks` iterates over all visible blocks. Uncommitted ones are not in inventories: commit requests report
        them."""
        self._blocks = blocks
        self._partition_map = partition_map
        self._make = make
        self._each = [make(self._of(0))]

    def __getitem__(self, partition: int) -> EventReplicator:
        return self._each[partition]

    def add_partitions(self) -> None:
        """Make the replicators of the other partitions, once their number is known. No link exists yet. Event numbers
        of blocks that change their replicator are reset, because each replicator counts its own."""
        if len(self._each) < self._partition_map.count:
            for block in self._blocks():
                if block.event_seq and self._partition_map.of(block.key):
                    block.event_seq = 0
        self._each += [self._make(self._of(partition)) for partition in range(len(self._each), self._partition_map.count)]

    def _of(self, partition: int) -> Parts:
        of = self._partition_map.of

        def parts(blocks: list[Block]) -> Iterator[Sequence[Block]]:
            for part in map(decided, _parts_of(blocks)):
                yield part if self._partition_map.count == 1 else [block for block in part if of(block.key) == partition]

        return lambda: parts(list(self._blocks()))

    def emit(self, kind: int, block: Block) -> None:
        """Pass an event of the table to the replicator of the block's partition."""
        self._each[self._partition_map.of(block.key)].emit(kind, block)

    def when_published(
        self, blocks: Sequence[Block], callback: Published, span: TraceSpan | None = None, *, is_over: Callable[[], bool] = never
    ) -> None:
        """Call back once the newest events of these blocks are durable at their masters; at once if they are. See
        `EventReplicator.when_published`."""
        groups = self._partition_map.group(blocks)
        answers: list[KVStoreError | None] = []

        def told(error: KVStoreError | None) -> None:
            answers.append(error)
            if len(answers) == len(groups):
                callback(next(filter(None, answers), None))

        for partition, group in groups.items():
            replicator = self._each[partition]
            awaited = [block for block in group if block.event_seq > replicator.durable_seq]
            events = [block.event_seq for block in awaited]
            replicator.when_published(max(events, default=0), told, span, oldest=min(events, default=0), blocks=awaited, is_over=is_over)
        if not groups:
            callback(None)

    def are_published(self, blocks: Sequence[Block]) -> bool:
        """Return True if the newest events of these blocks are durable at their masters."""
        return all(self._each[self._partition_map.of(block.key)].is_published(block.event_seq, block.event_seq) for block in blocks)

    @property
    def is_synced(self) -> bool:
        """True if every partition's master has the inventory of its link."""
        return all(one.is_synced for one in self._each)

    @property
    def backlog(self) -> int:
        """Number of events that are not durable at their masters."""
        return sum(one.backlog for one in self._each)

    def flush(self) -> None:
        for one in self._each:
            one.flush()

    def flush_now(self) -> None:
        for one in self._each:
            one.flush_now()

    def close(self) -> None:
        """Close every replicator; waiters fail with Unavailable."""
        for one in self._each:
            one.close()
