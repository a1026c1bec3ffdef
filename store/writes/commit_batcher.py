"""Commit batcher: commits uncommitted blocks to the directory in batches (group commit), and applies the master's
replies.

- A batch has blocks of one tenant, namespace and partition. It is sent `interval_s` after its first block, after half
  of that if no other block followed, and at once if a caller waits. A request per put would wake three processes for
  each, and compete with the next put.
- Requests follow all events emitted before them, so that the master never counts an evicted block as a replica.
- After a lost link all uncommitted blocks are sent again over the next one, behind its inventory.

Not thread-safe: called from the node's loop.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.protocol.catalog_messages import CommitBlocks
from kvstore.protocol.errors import KVStoreError, ProtocolError, Unavailable, typed
from kvstore.protocol.frames import MAX_BATCH, FrameHeader
from kvstore.protocol.master_messages import ReserveReply
from kvstore.protocol.message import BUSY
from kvstore.protocol.node_messages import WaitCommitted
from kvstore.rpc.reactor import Reactor, Timer
from kvstore.rpc.server.session import Session
from kvstore.rpc.tracing import call_within_spans
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.rows import are_any_dropped, keys_of, read, rows_of
from kvstore.store.block_table.table import BlockTable
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.replication.event_replicator import EventReplicators
from kvstore.store.session_authenticator import peer_of
from kvstore.store.writes.commit_requests import CommitWaits, SendCommit

MAX_IN_FLIGHT: Final = 4
"""Unanswered requests. Further blocks enlarge the next batches."""
FIRST_PAUSE_S: Final = 0.01
MAX_PAUSE_S: Final = 1.0
"""Pause before blocks are retried that another writer holds or the master refused. It doubles from FIRST_PAUSE_S to
this."""

log = logging.getLogger("kvstore.store")


@dataclass(slots=True)
class _PartitionBatch:
    """Link to the master of one partition."""

    ask: SendCommit
    epoch: int
    in_flight: int = 0


class CommitBatcher:
    """Sends commit requests. `link_up` and `link_down` follow the connection to each master."""

    def __init__(
        self,
        reactor: Reactor,
        table: BlockTable,
        replicators: EventReplicators,
        answers: CommitWaits,
        *,
        interval_s: float,
        on_space_freed: Callable[[], None],
    ) -> None:
        """`on_space_freed` is called when committed blocks have become evictable."""
        self._interval_s = interval_s
        self._is_due = False
        """Uncommitted blocks are sent as soon as the window allows."""
        self._due_timer: Timer | None = None
        self._timed_at = 0
        """Number of the newest block when the timer was set."""
        self._on_space_freed = on_space_freed
        self._reactor = reactor
        self._table = table
        self._uncommitted = table.uncommitted
        self._replicators = replicators
        self._answers = answers
        self._links: dict[int, _PartitionBatch] = {}
        """By partition."""
        self._pause_s = FIRST_PAUSE_S
        self._timer: Timer | None = None

    def link_up(self, ask: SendCommit, epoch: int, partition: int = 0) -> None:
        """Send all uncommitted blocks of the partition over a new link."""
        self.link_down(partition)
        self._links[partition] = _PartitionBatch(ask, epoch)
        self._again()

    def link_down(self, partition: int = 0) -> None:
        """Drop the link. Its unanswered requests fail, and their blocks are retried."""
        self._links.pop(partition, None)
        if self._timer is not None and not self._links:
            self._timer.cancel()
            self._timer = None

    @property
    def has_master(self) -> bool:
        """True if a master is linked, which commits blocks soon."""
        return bool(self._links)

    def flush(self) -> None:
        """Send uncommitted blocks as far as the window allows, and notify commit waiters. Called after each round of
        events, which forms batches."""
        for callback in self._uncommitted.take_due():
            self._reactor.guarded(callback)
        if not self._uncommitted.has_unsent:
            self._is_due = False
            return
        if self._interval_s and not (self._is_due or self._uncommitted.is_awaited):
            if self._due_timer is None:
                self._timed_at = self._uncommitted.last_number
                self._due_timer = self._reactor.call_later(self._interval_s / 2, self._become_half_due)
            return
        is_left = False
        for partition in sorted(self._uncommitted.partitions()):
            is_left |= self._send_batches(partition)
        self._is_due &= is_left

    def _send_batches(self, partition: int) -> bool:
        """Send requests for the partition as far as the window allows; return True if blocks are left."""
        replicator = self._replicators[partition]
        replicator.flush_now()
        while (link := self._links.get(partition)) is not None and link.in_flight < MAX_IN_FLIGHT and replicator.has_sent_all:
            blocks = self._uncommitted.take(MAX_BATCH, partition)
            if not blocks:
                return False
            self._send(link, blocks)
        return True

    def _become_half_due(self) -> None:
        """Wait for the second half of the interval if blocks were added in the first."""
        if self._uncommitted.last_number != self._timed_at:
            self._due_timer = self._reactor.call_later(self._interval_s / 2, self._become_due)
        else:
            self._become_due()

    def _become_due(self) -> None:
        """Make the batch due; `flush` follows at the end of this round."""
        self._due_timer = None
        self._is_due = True

    def await_all(self, session: Session, header: FrameHeader, message: WaitCommitted) -> None:
        """Answer once all of the tenant's present blocks are committed."""
        tenant = peer_of(session).tenant
        answer = self._answers.begin(session, header, bytearray())
        if self._uncommitted.has_unsent:
            self._uncommitted.note_cause(tenant, None, session.span(header.request_id))
        self._uncommitted.when_committed(tenant, lambda: answer.give(None), is_over=answer.is_over)

    def _send(self, link: _PartitionBatch, blocks: list[Block]) -> None:
        def decided(reply: ReserveReply | KVStoreError) -> None:
            self._uncommitted.end(blocks)
            if isinstance(reply, ReserveReply) and len(reply.statuses) != len(blocks):
                reply = ProtocolError("the master answered CommitBlocks for other keys")
            link.in_flight -= 1
            try:
                self._settle(blocks, reply)
            except Exception:
                log.exception("applying the master's commit reply failed")
                self._defer([block for block in blocks if block.generation == UNCOMMITTED])
            self._on_space_freed()

        link.in_flight += 1
        try:
            call_within_spans(self._uncommitted.take_causes(blocks[0]), link.ask, self._message(link.epoch, blocks), decided)
        except Exception as error:
            decided(typed(error))

    def _message(self, epoch: int, blocks: list[Block]) -> CommitBlocks:
        columns, rows = blocks[0].columns, rows_of(blocks)
        return CommitBlocks(
            epoch,
            blocks[0].tenant,
            blocks[0].namespace,
            keys_of(blocks),
            read(columns.sizes, rows).tolist(),
            read(columns.checksums, rows).tolist(),
            [block.parent for block in blocks],
            acknowledged=1,
            prompts=self._table.prompts.of(blocks),
        )

    def _settle(self, blocks: list[Block], reply: ReserveReply | KVStoreError) -> None:
        """Apply the master's reply; retry blocks that it did not decide."""
        if isinstance(reply, KVStoreError):
            if not isinstance(reply, Unavailable):  # else the link broke
                log.warning("committing %d blocks failed, retrying: %s: %s", len(blocks), type(reply).__name__, reply)
            self._defer(blocks)
            return
        if BUSY not in reply.statuses and all(reply.generations) and not are_any_dropped(blocks):  # usual case
            self._table.mark_all_committed(blocks, reply.generations)
            self._pause_s = FIRST_PAUSE_S
            return
        busy: list[Block] = []
        for block, status, generation in zip(blocks, reply.statuses, reply.generations, strict=True):
            if status == BUSY:
                busy.append(block)
            elif block.is_dropped:
                if generation:
                    self._table.retract(block, generation)
            elif generation:
                self._table.mark_committed(block, generation)
            else:
                self._table.copies.drop(block)  # the cluster has another version
        if busy:
            self._defer(busy)
        else:
            self._pause_s = FIRST_PAUSE_S

    def _defer(self, blocks: list[Block]) -> None:
        self._uncommitted.defer(blocks)
        if self._links and self._timer is None:
            self._timer = self._reactor.call_later(self._pause_s, self._again)
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def _again(self) -> None:
        self._timer = None
        self._uncommitted.retry_deferred()
        self._is_due = True
        self.flush()
