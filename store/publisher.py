"""What the master must hear, in order: commits, blocks that are gone, moves between tiers; and the inventory after each registration.

It turns the table's events into Publish messages, keeps a few in flight, and calls back those who wait until the master has made
an event durable. Events for which nobody waits, of blocks that left say, wait a moment for others: in a full tier each put makes one, and
a message for each would wake up the master as often. While there is no link nothing is kept: the inventory that opens every link says it
all; of what the master knows already by digests (comparison.py), if that is much.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvstore.protocol.catalog_messages import EVENT_COMMIT, EVENT_GONE, PHASE_STREAM, PHASE_SYNC, PHASE_SYNC_BEGIN, PHASE_SYNC_END, Publish
from kvstore.protocol.errors import KVStoreError, Unavailable
from kvstore.rpc.tracing import Span, on_behalf
from kvstore.store.blocks.block import Block
from kvstore.store.comparison import Comparison, Soon
from kvstore.store.comparison import Send as Compare

Send = Callable[[Publish, Callable[[KVStoreError | None], None]], None]
"""Sends one message to the master and calls back once with None (durable) or the error."""
Published = Callable[[KVStoreError | None], None]


class _Notice(NamedTuple):
    kind: int
    block: Block
    tier_mask: int


@dataclass(slots=True, eq=False)
class _Sent:
    """A message under way. With its answer and those of all before it every event up to `seq` is durable; 0 says nothing of events."""

    phase: int
    seq: int
    is_answered: bool = False


class Publisher:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(
        self,
        blocks: Callable[[], Iterable[Block]],
        *,
        batch_events: int,
        max_in_flight: int,
        later: Callable[[Callable[[], None]], object] | None = None,
        soon: Soon | None = None,
        compare_from_blocks: int = 1,
    ) -> None:
        """`later` calls its argument once the time is over that events wait for others, before a `flush`; None: they wait for none. `soon`
        calls it in a later turn of the loop; None: inventories are never compared. Nor are they where the master knows fewer than
        `compare_from_blocks`."""
        self._compare_from_blocks = compare_from_blocks
        self._soon = soon
        self._comparison: Comparison | None = None
        """While it is under way nothing else is said."""
        self._blocks = blocks
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
        self._durable_seq = 0
        self._queue: deque[_Notice] = deque()
        self._inventory: Iterator[Block] | None = None
        self._inventory_seq = 0
        self._is_synced = False
        self._in_flight: deque[_Sent] = deque()
        self._on_synced: Callable[[], None] = lambda: None
        self._waiters: list[tuple[int, int, Published]] = []
        self._next_waiter = 0
        self._unsaid_gone: dict[tuple[str, bytes], int] = {}
        """By tenant and key, the newest event in the queue that says that a block of it is gone."""
        self._causes: list[tuple[int, Span]] = []
        """Traced requests that wait for events which are not said yet, by these events."""
        self.on_refused: Callable[[KVStoreError], None] = lambda error: None
        """Called when the master refuses a message: the link must be made anew."""

    @property
    def is_synced(self) -> bool:
        """The master has the inventory of this link, and everything since up to the last few events."""
        return self._is_synced

    @property
    def has_said_all(self) -> bool:
        """Every event until now is on its way to the master, and so is the inventory: what is sent to it now comes behind them."""
        return self._send is not None and self._inventory is None and not self._queue

    @property
    def backlog(self) -> int:
        """Events that the master has not made durable yet."""
        return self._seq - self._durable_seq

    def emit(self, kind: int, block: Block) -> None:
        """The table's `emit`."""
        self._seq += 1
        block.event_seq = self._seq
        if self._send is not None:
            self._queue.append(_Notice(kind, block, block.tier_mask()))
            if kind == EVENT_GONE:
                self._unsaid_gone[block.tenant, block.key] = self._seq

    def is_published(self, seq: int) -> bool:
        """Every event up to `seq` is durable at the master."""
        return seq <= self._durable_seq

    def when_published(self, seq: int, callback: Published, span: Span | None = None) -> None:
        """Call back when every event up to `seq` is durable at the master: at once if it is, however long it takes if not. `span`: of the
        request that waits, if it is traced."""
        if seq <= self._durable_seq:
            callback(None)
            return
        heapq.heappush(self._waiters, (seq, self._next_waiter, callback))
        self._next_waiter += 1
        if span is not None:
            span.begin("kvstore.node.wait_for_master")
            if self._send is not None and seq > self._seq - len(self._queue):
                self._causes.append((seq, span))

    @property
    def last_seq(self) -> int:
        return self._seq

    def link_up(
        self, send: Send, epoch: int, on_synced: Callable[[], None], *, compare: Compare | None = None, known_blocks: int = 0
    ) -> None:
        """There is a new link, under this registration: tell it the whole inventory first, and `on_synced` when it has it. `known_blocks`:
        so many does the master think are here, and `compare` tells it digests."""
        self.link_down()
        self._on_synced = on_synced
        self._send, self._epoch = send, epoch
        blocks = list(self._blocks())
        self._inventory = iter(blocks)
        self._inventory_seq = self._seq
        self._say(PHASE_SYNC_BEGIN, [], 0)
        is_known = self._compare_from_blocks <= known_blocks and len(blocks) <= 2 * known_blocks
        if is_known and compare is not None and self._soon is not None and self._send is not None:
            self._comparison = Comparison(blocks, epoch=epoch, send=compare, soon=self._soon, then=self._compared)
        self.flush()

    def _compared(self, differing: list[Block] | KVStoreError) -> None:
        self._comparison = None
        if isinstance(differing, KVStoreError):
            self.link_down()
            self.on_refused(differing)
        else:
            self._inventory = iter(differing)
            self.flush()

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
        is_urgent = self._is_due or self._inventory is not None or bool(self._waiters) or len(self._queue) >= self._batch_events
        return self._later is not None and not is_urgent and bool(self._queue)

    def _come_due(self) -> None:
        self._is_timed = False
        self._is_due = True

    def flush_now(self) -> None:
        """Send what there is, as far as the window allows."""
        while self._send is not None and self._comparison is None and len(self._in_flight) < self._max_in_flight:
            if self._inventory is not None:
                self._say_inventory()
            elif self._queue:
                self._say_events()
            else:
                self._is_due = False
                return

    def say_gone(self, blocks: Sequence[Block]) -> bool:
        """Send what there is, as `flush_now`; and whatever the window, if it is still to be said that former blocks of these keys are gone.
        False: it is, and the rest of the inventory comes before it."""
        self.flush_now()
        while self._unsaid_gone and not self._unsaid_gone.keys().isdisjoint((block.tenant, block.key) for block in blocks):
            if self._inventory is not None:
                return False
            self._say_events()
        return True

    def _say_events(self) -> None:
        first = self._seq - len(self._queue) + 1
        events = [self._queue.popleft() for _ in range(min(len(self._queue), self._batch_events))]
        for seq, (kind, block, _tier_mask) in enumerate(events if self._unsaid_gone else (), first):
            if kind == EVENT_GONE and self._unsaid_gone[block.tenant, block.key] == seq:
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
                self.link_down()
                self.on_refused(error)
                return
            sent.is_answered = True
            self._advance()
            self.flush()

        on_behalf(self._said_for(seq) if self._causes else (), self._send, _message(self._epoch, phase, events), answered)

    def _said_for(self, seq: int) -> list[Span]:
        """The traced requests that wait for events up to that one; each is given once."""
        found = [span for awaited_seq, span in self._causes if awaited_seq <= seq]
        self._causes = [cause for cause in self._causes if cause[0] > seq]
        return found

    def _advance(self) -> None:
        """Take in the answers that came, in the order of the messages: one may be answered before its predecessor is durable."""
        while self._in_flight and self._in_flight[0].is_answered:
            sent = self._in_flight.popleft()
            self._durable_seq = max(self._durable_seq, sent.seq)
            if sent.phase == PHASE_SYNC_END:
                self._is_synced = True
                self._on_synced()
        while self._waiters and self._waiters[0][0] <= self._durable_seq:
            heapq.heappop(self._waiters)[2](None)

    def close(self) -> None:
        """Nothing more will be published: who waits is told."""
        self.link_down()
        waiters, self._waiters = self._waiters, []
        for _, _, callback in waiters:
            callback(Unavailable("the node stops before the master has made this durable; try again"))


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
        tiers=bytes(event.tier_mask for event in events),
        parents=[block.parent for block in blocks],
    )
