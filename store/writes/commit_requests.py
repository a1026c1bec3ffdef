"""Puts that the master has to decide about before they are answered: their values are here, invisible, and one Claim a partition asks
the master to reserve and publish them.

It saves the writer's own round trip to the master, which for a small value is a third of the whole put. Answers that wait for it are
given exactly once, no later than the caller waits. Not thread-safe: the node's loop is the only caller.
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
from kvstore.store.block_table.partitioning import Partitioning
from kvstore.store.block_table.table import BlockTable
from kvstore.store.replication.event_replicator import EventReplicators
from kvstore.store.session_authenticator import PutFrame
from kvstore.store.wait_queue import until_ns

NOT_CONFIRMED: Final = "the put is not confirmed: the master has not recorded it within the deadline. It may be lost: put it again"

Ask = Callable[[CommitBlocks, Callable[[ReserveReply | KVStoreError], None]], None]
"""Sends a claim to the master and calls back once."""

_Wanted = list[tuple[int, OpenPut]]
"""Puts by their place in the frame."""


class PendingAnswer:
    """An answer that waits for the master. `flags` may change until it is given."""

    __slots__ = ("_answers", "_request_id", "flags", "session", "until_ns")

    def __init__(self, answers: "CommitWaits", session: Session, header: FrameHeader, flags: bytearray) -> None:
        self._answers = answers
        self.session = session
        self._request_id = header.request_id
        self.flags = flags
        self.until_ns = until_ns(session, header)

    def is_over(self) -> bool:
        """It has been given."""
        return not self._answers.waits(self)

    def give(self, error: Exception | None) -> None:
        """Answer the request: with the flags as they are now for None, else with the error. Only the first call counts."""
        if not self._answers.take(self):
            return
        if error is None:
            self.session.reply(self._request_id, Flags(bytes(self.flags)))
        else:
            self.session.fail(self._request_id, error)


class CommitWaits:
    """The answers that wait for the master. Not thread-safe: the node's loop is the only caller."""

    def __init__(self) -> None:
        self._pending: dict[PendingAnswer, None] = {}
        """In the order in which they were asked for, so that it does not hang on where objects lie in memory who hears first."""
        self._by_session: dict[Session, dict[PendingAnswer, None]] = {}
        """The same. None of them empty."""

    def begin(self, session: Session, header: FrameHeader, flags: bytearray) -> PendingAnswer:
        """The answer to the request, to be given later, or by `expire`."""
        answer = PendingAnswer(self, session, header, flags)
        self._pending[answer] = None
        self._by_session.setdefault(session, {})[answer] = None
        return answer

    def waits(self, answer: PendingAnswer) -> bool:
        """Whether it has yet to be given."""
        return answer in self._pending

    def take(self, answer: PendingAnswer) -> bool:
        """Whether it waits still; it does not any more."""
        if answer not in self._pending:
            return False
        del self._pending[answer]
        others = self._by_session[answer.session]
        del others[answer]
        if not others:
            del self._by_session[answer.session]
        return True

    def forget_owner(self, session: Session) -> None:
        """The asker is gone, and so is what waits for him: it would be kept until his deadline, however many come and go."""
        for answer in self._by_session.pop(session, ()):
            del self._pending[answer]

    def expire(self, *, now_ns: int) -> int:
        """Answer those whose time is over; returns how many. What they wait for goes on."""
        late = [answer for answer in self._pending if answer.until_ns <= now_ns]
        for answer in late:
            answer.give(DeadlineExceeded(NOT_CONFIRMED))
        return len(late)

    def __len__(self) -> int:
        return len(self._pending)


class _PendingPut:
    """A Put whose claims have not all been answered yet: one for each partition that it has keys of."""

    __slots__ = (
        "_answer",
        "_claims",
        "_entering",
        "_error",
        "_frame",
        "_is_asked_again",
        "_left",
        "_publishers",
        "_span",
        "_stored",
        "_table",
    )

    def __init__(
        self,
        claims: "CommitRequests",
        table: BlockTable,
        publishers: EventReplicators,
        frame: PutFrame,
        answer: PendingAnswer,
        span: TraceSpan | None,
    ) -> None:
        self._claims = claims
        self._table = table
        self._span = span
        self._publishers = publishers
        self._frame = frame
        self._answer = answer
        self._left = 1
        self._error: Exception | None = None
        self._is_asked_again = False
        self._stored: list[tuple[int, Block]] = []
        """By the place in the frame."""
        self._entering: list[Block] = []
        """Shown, and the rest of what makes them visible is to follow."""

    def parts(self, partitioning: Partitioning) -> dict[int, _Wanted]:
        """What is to be claimed, by partition; each is to be settled by `decided` or `ask_again`."""
        found: dict[int, _Wanted] = {}
        for at, put in enumerate(self._frame.puts):
            if put is not None:
                found.setdefault(partitioning.of(put.block.key), []).append((at, put))
        self._left = len(found)
        return found

    def claim(self, wanted: _Wanted, epoch: int) -> CommitBlocks:
        blocks = [put.block for _, put in wanted]
        self._table.undecided.begin(blocks)
        return CommitBlocks(
            epoch,
            blocks[0].tenant,
            blocks[0].namespace,
            [block.key for block in blocks],
            [block.size_bytes for block in blocks],
            [self._frame.checksums[at] for at, _ in wanted],
            [block.parent for block in blocks],
        )

    def decided(self, wanted: _Wanted, reply: ReserveReply | KVStoreError) -> None:
        """Carry out what a master has decided, at once: its next word may be that a block is removed which it takes to be here. Answer when
        all have decided. Whatever is raised is the answer then, and nothing undecided stays. Of a master that is gone, or no longer the
        owner, the writer hears nothing: it asks again, which the next owner answers."""
        self._table.undecided.end([put.block for _, put in wanted])
        if isinstance(reply, ReserveReply) and len(reply.statuses) != len(wanted):
            reply = ProtocolError("the master answered a Claim for other keys")
        try:
            if isinstance(reply, Unavailable | StaleEpoch):
                self.ask_again(wanted)
                return
            if isinstance(reply, KVStoreError):
                raise reply
            for (at, put), status, generation in zip(wanted, reply.statuses, reply.generations, strict=True):
                self._answer.flags[at] = flag = self._settle(put, self._frame.checksums[at], status, generation)
                if flag == STORED:
                    self._stored.append((at, put.block))
        except Exception as error:
            self._fail(wanted, error)
        try:
            self._is_decided()
        finally:  # behind the answer: the writer's process is being woken up meanwhile
            entering, self._entering = self._entering, []
            for block in entering:
                self._table.enter_claimed(block)

    def _fail(self, wanted: _Wanted, error: Exception) -> None:
        for _, put in wanted:
            self._table.abort(put)
        self._error = self._error or error

    def ask_again(self, wanted: _Wanted) -> None:
        """Nothing is decided of these. What was there already and is not durable is asked for again, too."""
        for _, put in wanted:
            self._table.abort(put)
        self._is_asked_again = True
        self._is_decided()

    def _is_decided(self) -> None:
        """One part is."""
        self._left -= 1
        if self._left:
            return
        self._record()
        if self._error is not None:
            self._answer.give(self._error)
        elif self._is_asked_again:
            if not self._publishers.are_published(self._frame.waits):
                for at, status in enumerate(self._frame.statuses):
                    if status == PRESENT:
                        self._answer.flags[at] = RETRY_LATER
            self._answer.give(None)
        else:
            # What was there already may not be durable yet: "already there" is said once it is.
            self._publishers.when_published(self._frame.waits, self._answer.give, self._span, is_over=self._answer.is_over)

    def _record(self) -> None:
        """Tell those who follow what is stored here of what is still there, in the order of the frame: parents come first."""
        if self._stored and self._table.events.is_recording:
            blocks = [block for _at, block in sorted(self._stored, key=itemgetter(0))]
            there = [block for block in blocks if self._table.find(block.tenant, block.key) is block]
            self._table.events.stored(blocks[0].tenant, there)

    def _settle(self, put: OpenPut, checksum: int, status: int, generation: int) -> int:
        """Carry out the decision on one put; its flag."""
        if status == GRANTED and self._table.puts.holds(put):
            self._table.commit_claimed(put, checksum, generation)
            self._entering.append(put.block)
            self._claims.in_bytes += put.block.size_bytes
            return STORED
        self._table.abort(put)
        if status == GRANTED:  # it expired, or its writer left, while the master decided
            self._table.disown(put.block, generation)
            return RETRY_LATER
        return ALREADY_STORED if status == PRESENT else RETRY_LATER


class CommitRequests:
    """See the module. `link_up` and `link_down` follow the node's connection to a partition's master."""

    def __init__(self, table: BlockTable, answers: CommitWaits, publishers: EventReplicators, partitioning: Partitioning) -> None:
        self._table = table
        self._answers = answers
        self._publishers = publishers
        self._partitioning = partitioning
        self._links: dict[int, tuple[Ask, int]] = {}
        """By partition, with the registration's epoch."""
        self.in_bytes = 0
        """Of values that masters have granted."""

    def link_up(self, ask: Ask, epoch: int, partition: int = 0) -> None:
        self._links[partition] = ask, epoch

    def link_down(self, partition: int = 0) -> None:
        self._links.pop(partition, None)

    def claim(self, session: Session, header: FrameHeader, frame: PutFrame) -> None:
        """Answer the Put, one of whose puts is open, once its masters have decided. Without a master the writer is told to ask again, as it
        does until its deadline: another one takes over within seconds."""
        flags = bytearray(ALREADY_STORED if status == PRESENT else RETRY_LATER for status in frame.statuses)
        answer = self._answers.begin(session, header, flags)
        span = session.span(header.request_id)
        undecided = _PendingPut(self, self._table, self._publishers, frame, answer, span)
        parts = undecided.parts(self._partitioning)
        for partition, wanted in parts.items():
            # Else the master may take this node for a holder of what has left since. To say that may be what shows that the link is gone.
            self._publishers[partition].say_gone([put.block for _at, put in wanted])
            link = self._links.get(partition)
            if link is None:
                undecided.ask_again(wanted)
                continue
            ask, epoch = link
            try:
                decided = partial(undecided.decided, wanted)
                call_within_spans((span,) if span is not None else (), ask, undecided.claim(wanted, epoch), decided)
            except BaseException:
                self._table.undecided.end([put.block for _, put in wanted])
                self._answers.take(answer)
                raise
