"""Puts that nobody reserved: their values are here, invisible, and the master is asked to reserve and publish them in one message.

It saves the writer's own round trip to the master, which for a small value is a third of the whole put. Not thread-safe: the node's
loop is the only caller.
"""

from collections.abc import Callable

from kvstore.protocol.catalog_messages import Claim
from kvstore.protocol.errors import KVStoreError, ProtocolError, StaleEpoch, Unavailable
from kvstore.protocol.frames import Header
from kvstore.protocol.master_messages import Grants
from kvstore.protocol.message import GRANTED, PRESENT
from kvstore.protocol.node_messages import ALREADY_THERE, ASK_AGAIN, STORED
from kvstore.rpc.session import Session
from kvstore.rpc.tracing import Span, on_behalf
from kvstore.store.blocks.open_puts import OpenPut
from kvstore.store.blocks.table import BlockTable
from kvstore.store.caller import PutFrame
from kvstore.store.publisher import Publisher
from kvstore.store.puts.answering import Answers, PendingAnswer

Ask = Callable[[Claim, Callable[[Grants | KVStoreError], None]], None]
"""Sends a claim to the master and calls back once."""


class _UndecidedPut:
    """A Put whose claim the master has not answered yet."""

    __slots__ = ("_answer", "_frame", "_publisher", "_span", "_table", "_wanted")

    def __init__(self, table: BlockTable, publisher: Publisher, frame: PutFrame, answer: PendingAnswer, span: Span | None) -> None:
        self._table = table
        self._span = span
        self._publisher = publisher
        self._frame = frame
        self._answer = answer
        self._wanted = [(at, put) for at, put in enumerate(frame.puts) if put is not None]

    def claim(self, epoch: int) -> Claim:
        blocks = [put.block for _, put in self._wanted]
        self._table.undecided.begin(blocks)
        return Claim(
            epoch,
            blocks[0].tenant,
            blocks[0].namespace,
            [block.key for block in blocks],
            [block.size_bytes for block in blocks],
            [self._frame.checksums[at] for at, _ in self._wanted],
            [block.parent for block in blocks],
        )

    def decided(self, reply: Grants | KVStoreError) -> None:
        """Carry out the master's decision, and answer. Whatever is raised is the answer then, and nothing undecided stays. Of a master that
        is gone, or no longer the owner, the writer hears nothing: it asks again, which the next owner answers."""
        self._table.undecided.end([put.block for _, put in self._wanted])
        if isinstance(reply, Grants) and len(reply.statuses) != len(self._wanted):
            reply = ProtocolError("the master answered a Claim for other keys")
        try:
            if isinstance(reply, (Unavailable, StaleEpoch)):
                self.ask_again()
                return
            if isinstance(reply, KVStoreError):
                raise reply
            self._settle_all(reply)
        except Exception as error:
            for _, put in self._wanted:
                self._table.abort(put)
            self._answer.give(error)

    def ask_again(self) -> None:
        """Nothing is decided. What was there already and is not durable is asked for again, too."""
        for _, put in self._wanted:
            self._table.abort(put)
        if not self._publisher.is_published(self._frame.wait_seq):
            self._answer.flags[:] = bytes((ASK_AGAIN,)) * len(self._answer.flags)
        self._answer.give(None)

    def _settle_all(self, grants: Grants) -> None:
        flags, checksums = self._answer.flags, self._frame.checksums
        for (at, put), status, generation in zip(self._wanted, grants.statuses, grants.generations, strict=True):
            flags[at] = self._settle(put, checksums[at], status, generation)
        if self._table.events.is_recording:
            stored = [put.block for at, put in self._wanted if flags[at] == STORED]
            self._table.events.stored(self._wanted[0][1].block.tenant, stored)
        # What was there already may not be durable yet: "already there" is said once it is.
        self._publisher.when_published(self._frame.wait_seq, self._answer.give, self._span)

    def _settle(self, put: OpenPut, checksum: int, status: int, generation: int) -> int:
        """Carry out the decision on one put; its flag."""
        if status == GRANTED and self._table.is_open(put):
            self._table.commit_claimed(put, checksum, generation)
            return STORED
        self._table.abort(put)
        if status == GRANTED:  # it expired, or its writer left, while the master decided
            self._table.disown(put.block, generation)
            return ASK_AGAIN
        return ALREADY_THERE if status == PRESENT else ASK_AGAIN


class Claims:
    """See the module. `link_up` and `link_down` follow the node's connection to its master."""

    def __init__(self, table: BlockTable, answers: Answers, publisher: Publisher) -> None:
        self._table = table
        self._answers = answers
        self._publisher = publisher
        self._ask: Ask | None = None
        self._epoch = 0

    def link_up(self, ask: Ask, epoch: int) -> None:
        self._ask, self._epoch = ask, epoch

    def link_down(self) -> None:
        self._ask = None

    def claim(self, session: Session, header: Header, frame: PutFrame) -> None:
        """Answer the Put, one of whose puts is open, once the master has decided. Without a master the writer is told to ask again, as it
        does until its deadline: another one takes over within seconds."""
        flags = bytearray(ALREADY_THERE if status == PRESENT else ASK_AGAIN for status in frame.statuses)
        answer = self._answers.begin(session, header, flags)
        span = session.span(header.request_id)
        undecided = _UndecidedPut(self._table, self._publisher, frame, answer, span)
        self._publisher.flush_now()  # else the master may take this node for a holder by what has left since
        ask = self._ask  # to send what there was may have been what showed that the link is gone
        if ask is None:
            undecided.ask_again()
            return
        try:
            on_behalf((span,) if span is not None else (), ask, undecided.claim(self._epoch), undecided.decided)
        except BaseException:
            self._table.undecided.end([put.block for put in frame.puts if put is not None])
            self._answers.take(answer)
            raise
