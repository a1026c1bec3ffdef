"""Puts that the master commits before they are answered: their values are received and invisible; one CommitBlocks per
partition reserves and publishes them.

It saves the writer's own round trip to the master, a third of a small put. Each pending answer is given exactly once,
at the latest at the caller's deadline. Not thread-safe: called from the node's loop.
"""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Final

from kvstore.protocol.catalog_messages import CommitBlocks
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, ProtocolError, StaleEpoch, Unavailable
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.master_messages import ReserveReply
from kvstore.protocol.message import GRANTED, PRESENT
from kvstore.protocol.node_messages import ALREADY_STORED, RETRY_LATER, STORED
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.server.session import Session
from kvstore.rpc.tracing import TraceSpan, call_within_spans
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.open_puts import OpenPut
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.block_table.table import BlockTable
from kvstore.store.replication.event_replicator import EventReplicators
from kvstore.store.session_authenticator import PutFrame
from kvstore.store.wait_queue import until_ns

NOT_CONFIRMED: Final = "the put is not confirmed: the master has not recorded it within the deadline. It may be lost: put it again"

SendCommit = Callable[[CommitBlocks, Callable[[ReserveReply | KVStoreError], None]], None]
"""Sends a CommitBlocks to the master and calls back once."""

_Part = list[tuple[int, OpenPut]]
"""Puts with their index in the frame."""


class PendingAnswer:
    """Answer that waits for the master. `flags` may change until it is given."""

    __slots__ = ("_answers", "_request_id", "flags", "session", "until_ns")

    def __init__(self, answers: "CommitWaits", session: Session, header: FrameHeader, flags: bytearray) -> None:
        self._answers = answers
        self.session = session
        self._request_id = header.request_id
        self.flags = flags
        self.until_ns = until_ns(session, header)

    def is_over(self) -> bool:
        """Return True if it was given."""
        return not self._answers.waits(self)

    def give(self, error: Exception | None) -> None:
        """Answer the request: with the current flags for None, else with the error. Later calls have no effect."""
        if not self._answers.take(self):
            return
        if error is None:
            self.session.reply(self._request_id, Flags(bytes(self.flags)))
        else:
            self.session.fail(self._request_id, error)


class CommitWaits:
    """Pending answers by session. Not thread-safe: called from the node's loop."""

    def __init__(self) -> None:
        self._pending: dict[PendingAnswer, None] = {}
        """In the order of the requests; a set's order would depend on addresses."""
        self._by_session: dict[Session, dict[PendingAnswer, None]] = {}
        """By session. No empty dicts."""

    def begin(self, session: Session, header: FrameHeader, flags: bytearray) -> PendingAnswer:
        """Return a pending answer to the request."""
        answer = PendingAnswer(self, session, header, flags)
        self._pending[answer] = None
        self._by_session.setdefault(session, {})[answer] = None
        return answer

    def waits(self, answer: PendingAnswer) -> bool:
        """Return True if the answer is pending."""
        return answer in self._pending

    def take(self, answer: PendingAnswer) -> bool:
        """Remove a pending answer; return True if it was pending."""
        if answer not in self._pending:
            return False
        del self._pending[answer]
        others = self._by_session[answer.session]
        del others[answer]
        if not others:
            del self._by_session[answer.session]
        return True

    def forget_owner(self, session: Session) -> None:
        """Drop the answers of a closed connection, which would otherwise be kept until their deadlines."""
        for answer in self._by_session.pop(session, ()):
            del self._pending[answer]

    def expire(self, *, now_ns: int) -> int:
        """Fail answers whose deadline is over; return their number. Their commits continue."""
        late = [answer for answer in self._pending if answer.until_ns <= now_ns]
        for answer in late:
            answer.give(DeadlineExceeded(NOT_CONFIRMED))
        return len(late)

    def __len__(self) -> int:
        return len(self._pending)


class _PendingPut:
    """Put with unanswered commit requests, one per partition."""

    __slots__ = (
        "_answer",
        "_entering",
        "_error",
        "_frame",
        "_is_retried",
        "_left",
        "_replicators",
        "_requests",
        "_span",
        "_stored",
        "_table",
    )

    def __init__(
        self,
        claims: "CommitRequests",
        table: BlockTable,
        replicators: EventReplicators,
        frame: PutFrame,
        answer: PendingAnswer,
        span: TraceSpan | None,
    ) -> None:
        self._requests = claims
        self._table = table
        self._span = span
        self._replicators = replicators
        self._frame = frame
        self._answer = answer
        self._left = 1
        self._error: Exception | None = None
        self._is_retried = False
        self._stored: list[tuple[int, Block]] = []
        """With the index in the frame."""
        self._entering: list[Block] = []
        """Visible blocks whose bookkeeping is incomplete."""

    def parts(self, partition_map: PartitionMap) -> dict[int, _Part]:
        """Return the puts by partition. `decided` or `answer_retry` must follow for each."""
        found: dict[int, _Part] = {}
        for at, put in enumerate(self._frame.puts):
            if put is not None:
                found.setdefault(partition_map.of(put.block.key), []).append((at, put))
        self._left = len(found)
        return found

    def claim(self, part: _Part, epoch: int) -> CommitBlocks:
        blocks = [put.block for _, put in part]
        self._table.uncommitted.begin(blocks)
        return CommitBlocks(
            epoch,
            blocks[0].tenant,
            blocks[0].namespace,
            [block.key for block in blocks],
            [block.size_bytes for block in blocks],
            [self._frame.checksums[at] for at, _ in part],
            [block.parent for block in blocks],
            prompts=self._table.prompts.of(blocks),
        )

    def decided(self, part: _Part, reply: ReserveReply | KVStoreError) -> None:
        """Apply a master's reply at once: its next message may remove a block that it believes stored. Answer once all
        partitions have replied.

        An exception becomes the answer, and no put stays open. After Unavailable or StaleEpoch the writer is answered
        RETRY_LATER, and the next owner decides.
        """
        self._table.uncommitted.end([put.block for _, put in part])
        if isinstance(reply, ReserveReply) and len(reply.statuses) != len(part):
            reply = ProtocolError("the master answered a Claim for other keys")
        try:
            if isinstance(reply, Unavailable | StaleEpoch):
                self.answer_retry(part)
                return
            if isinstance(reply, KVStoreError):
                raise reply
            for (at, put), status, generation in zip(part, reply.statuses, reply.generations, strict=True):
                self._answer.flags[at] = flag = self._settle(put, self._frame.checksums[at], status, generation)
                if flag == STORED:
                    self._stored.append((at, put.block))
        except Exception as error:
            self._fail(part, error)
        try:
            self._finish_part()
        finally:  # after the answer, while the writer's process wakes up
            entering, self._entering = self._entering, []
            for block in entering:
                self._table.enter_granted(block)

    def _fail(self, part: _Part, error: Exception) -> None:
        for _, put in part:
            self._table.abort(put)
        self._error = self._error or error

    def answer_retry(self, part: _Part) -> None:
        """Answer RETRY_LATER for these puts, and for blocks that were present and are not durable."""
        for _, put in part:
            self._table.abort(put)
        self._is_retried = True
        self._finish_part()

    def _finish_part(self) -> None:
        """Count one partition; answer after the last."""
        self._left -= 1
        if self._left:
            return
        self._record()
        if self._error is not None:
            self._answer.give(self._error)
        elif self._is_retried:
            if not self._replicators.are_published(self._frame.waits):
                for at, status in enumerate(self._frame.statuses):
                    if status == PRESENT:
                        self._answer.flags[at] = RETRY_LATER
            self._answer.give(None)
        else:
            # ALREADY_STORED is answered once the present blocks are durable.
            self._replicators.when_published(self._frame.waits, self._answer.give, self._span, is_over=self._answer.is_over)

    def _record(self) -> None:
        """Record events of stored blocks that are still here, in the order of the frame: parents first."""
        if self._stored and self._table.events.is_recording:
            blocks = [block for _at, block in sorted(self._stored, key=itemgetter(0))]
            there = [block for block in blocks if self._table.find(block.tenant, block.key) is block]
            self._table.events.stored(blocks[0].tenant, there)

    def _settle(self, put: OpenPut, checksum: int, status: int, generation: int) -> int:
        """Apply the reply to one put and return its flag."""
        if status == GRANTED and self._table.puts.holds(put):
            self._table.commit_granted(put, checksum, generation)
            self._entering.append(put.block)
            self._requests.in_bytes += put.block.size_bytes
            return STORED
        self._table.abort(put)
        if status == GRANTED:  # it expired or its writer disconnected meanwhile
            self._table.retract(put.block, generation)
            return RETRY_LATER
        return ALREADY_STORED if status == PRESENT else RETRY_LATER


class CommitRequests:
    """Sends CommitBlocks for puts. `link_up` and `link_down` follow the connection to each master."""

    def __init__(self, table: BlockTable, answers: CommitWaits, replicators: EventReplicators, partition_map: PartitionMap) -> None:
        self._table = table
        self._answers = answers
        self._replicators = replicators
        self._partition_map = partition_map
        self._links: dict[int, tuple[SendCommit, int]] = {}
        """By partition, with the registration epoch."""
        self.in_bytes = 0
        """Bytes of values that masters committed."""

    def link_up(self, ask: SendCommit, epoch: int, partition: int = 0) -> None:
        self._links[partition] = ask, epoch

    def link_down(self, partition: int = 0) -> None:
        self._links.pop(partition, None)

    def claim(self, session: Session, header: FrameHeader, frame: PutFrame) -> None:
        """Answer the Put once its masters have replied; at least one of its puts is open. Without a link the writer is
        answered RETRY_LATER: another owner follows within seconds."""
        flags = bytearray(ALREADY_STORED if status == PRESENT else RETRY_LATER for status in frame.statuses)
        answer = self._answers.begin(session, header, flags)
        span = session.span(header.request_id)
        uncommitted = _PendingPut(self, self._table, self._replicators, frame, answer, span)
        parts = uncommitted.parts(self._partition_map)
        self._table.prompts.of(put.block for put in frame.puts if put is not None)  # in order, before partitions part them
        for partition, part in parts.items():
            # Otherwise the master may count an evicted block as a replica. Sending may reveal that the link is lost.
            self._replicators[partition].send_evictions([put.block for _at, put in part])
            link = self._links.get(partition)
            if link is None:
                uncommitted.answer_retry(part)
                continue
            ask, epoch = link
            try:
                decided = partial(uncommitted.decided, part)
                call_within_spans((span,) if span is not None else (), ask, uncommitted.claim(part, epoch), decided)
            except BaseException:
                self._table.uncommitted.end([put.block for _, put in part])
                self._answers.take(answer)
                raise
