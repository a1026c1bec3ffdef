"""How the master decides about blocks that are visible here already: it is asked with Claim, in batches, and what it says is carried out.

A batch is whatever came since the last one, for one tenant and namespace. It is sent `interval_s` after its first block came, half of that
where nothing else came meanwhile, or at once when somebody waits for what the master says: a claim a put would wake up three processes for
each of them, and one that waits for nothing meets the next put. Claims go out after the
events that were emitted before them, so that the master never takes this node for a holder by what the node has said is gone. What the
master has not decided about when the link breaks is claimed over the next one, behind its inventory. Not thread-safe: the node's loop is
the only caller.
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
from kvstore.store.block_table.rows import are_any_gone, keys_of, read, rows_of
from kvstore.store.block_table.table import BlockTable
from kvstore.store.block_table.uncommitted import UNDECIDED
from kvstore.store.replication.event_replicator import EventReplicators
from kvstore.store.session_authenticator import peer_of
from kvstore.store.writes.commit_requests import Ask, CommitWaits

MAX_IN_FLIGHT: Final = 4
"""Claims that may wait for their answer: what comes meanwhile makes the next ones larger."""
FIRST_PAUSE_S: Final = 0.01
MAX_PAUSE_S: Final = 1.0
"""Before what another writer was at, or the master refused, is claimed again: doubles from the first to the last."""

log = logging.getLogger("kvstore.store")


@dataclass(slots=True)
class _PartitionBatch:
    """To the master of one partition."""

    ask: Ask
    epoch: int
    in_flight: int = 0


class CommitBatcher:
    """See the module. `link_up` and `link_down` follow the node's connection to its master."""

    def __init__(
        self,
        reactor: Reactor,
        table: BlockTable,
        publishers: EventReplicators,
        answers: CommitWaits,
        *,
        interval_s: float,
        on_room: Callable[[], None],
    ) -> None:
        """`on_room` is called when blocks may leave their tier that could not before."""
        self._interval_s = interval_s
        self._is_due = False
        """What there is to claim goes out as soon as the window allows."""
        self._due_timer: Timer | None = None
        self._timed_at = 0
        """What the last block put was numbered when the timer was set."""
        self._on_room = on_room
        self._reactor = reactor
        self._table = table
        self._undecided = table.undecided
        self._publishers = publishers
        self._answers = answers
        self._links: dict[int, _PartitionBatch] = {}
        """By partition."""
        self._pause_s = FIRST_PAUSE_S
        self._timer: Timer | None = None

    def link_up(self, ask: Ask, epoch: int, partition: int = 0) -> None:
        """There is a new link, under this registration: everything undecided of the partition is claimed over it."""
        self.link_down(partition)
        self._links[partition] = _PartitionBatch(ask, epoch)
        self._again()

    def link_down(self, partition: int = 0) -> None:
        """There is no link. What was claimed over it comes back, for its answers never will."""
        self._links.pop(partition, None)
        if self._timer is not None and not self._links:
            self._timer.cancel()
            self._timer = None

    @property
    def has_master(self) -> bool:
        """Whether there is a master, which decides soon about what was put last."""
        return bool(self._links)

    def flush(self) -> None:
        """Claim what is undecided, as far as the window allows, and answer who waited for what is decided. Called after every round of
        events, so that batches form by themselves."""
        for callback in self._undecided.take_due():
            self._reactor.guarded(callback)
        if not self._undecided.has_to_claim:
            self._is_due = False
            return
        if self._interval_s and not (self._is_due or self._undecided.is_awaited):
            if self._due_timer is None:
                self._timed_at = self._undecided.last_number
                self._due_timer = self._reactor.call_later(self._interval_s / 2, self._come_half_due)
            return
        is_left = False
        for partition in sorted(self._undecided.partitions()):
            is_left |= self._claim_all(partition)
        self._is_due &= is_left

    def _claim_all(self, partition: int) -> bool:
        """Claim what is undecided of the partition, as far as the window allows; whether something is left."""
        publisher = self._publishers[partition]
        publisher.flush_now()
        while (link := self._links.get(partition)) is not None and link.in_flight < MAX_IN_FLIGHT and publisher.has_said_all:
            blocks = self._undecided.take(MAX_BATCH, partition)
            if not blocks:
                return False
            self._claim(link, blocks)
        return True

    def _come_half_due(self) -> None:
        """More has come since, and more is likely to: the other half is waited for, too."""
        if self._undecided.last_number != self._timed_at:
            self._due_timer = self._reactor.call_later(self._interval_s / 2, self._come_due)
        else:
            self._come_due()

    def _come_due(self) -> None:
        """`flush` follows, at the end of this round."""
        self._due_timer = None
        self._is_due = True

    def await_all(self, session: Session, header: FrameHeader, message: WaitCommitted) -> None:
        """Answer once the master has decided about all that this tenant has here now."""
        tenant = peer_of(session).tenant
        answer = self._answers.begin(session, header, bytearray())
        if self._undecided.has_to_claim:
            self._undecided.put_by(tenant, None, session.span(header.request_id))
        self._undecided.when_decided(tenant, lambda: answer.give(None), is_over=answer.is_over)

    def _claim(self, link: _PartitionBatch, blocks: list[Block]) -> None:
        def decided(reply: ReserveReply | KVStoreError) -> None:
            self._undecided.end(blocks)
            if isinstance(reply, ReserveReply) and len(reply.statuses) != len(blocks):
                reply = ProtocolError("the master answered a Claim for other keys")
            link.in_flight -= 1
            try:
                self._settle(blocks, reply)
            except Exception:
                log.exception("a decision of the master could not be carried out")
                self._put_off([block for block in blocks if block.generation == UNDECIDED])
            self._on_room()

        link.in_flight += 1
        try:
            call_within_spans(self._undecided.claimed_for(blocks[0]), link.ask, self._message(link.epoch, blocks), decided)
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
        )

    def _settle(self, blocks: list[Block], reply: ReserveReply | KVStoreError) -> None:
        """Carry out the master's decision; what it has not decided about is claimed again after a pause."""
        if isinstance(reply, KVStoreError):
            if not isinstance(reply, Unavailable):  # else the link broke
                log.warning(
                    "the master did not decide about %d blocks, it is asked again: %s: %s", len(blocks), type(reply).__name__, reply
                )
            self._put_off(blocks)
            return
        if BUSY not in reply.statuses and all(reply.generations) and not are_any_gone(blocks):  # as a rule
            self._table.decide_all(blocks, reply.generations)
            self._pause_s = FIRST_PAUSE_S
            return
        busy: list[Block] = []
        for block, status, generation in zip(blocks, reply.statuses, reply.generations, strict=True):
            if status == BUSY:
                busy.append(block)
            elif block.is_gone:
                if generation:
                    self._table.disown(block, generation)
            elif generation:
                self._table.decide(block, generation)
            else:
                self._table.copies.drop(block)  # the cluster has another version
        if busy:
            self._put_off(busy)
        else:
            self._pause_s = FIRST_PAUSE_S

    def _put_off(self, blocks: list[Block]) -> None:
        self._undecided.put_off(blocks)
        if self._links and self._timer is None:
            self._timer = self._reactor.call_later(self._pause_s, self._again)
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def _again(self) -> None:
        self._timer = None
        self._undecided.claim_again()
        self._is_due = True
        self.flush()
