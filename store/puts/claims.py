"""Puts that nobody reserved: their values are here, invisible, and the master is asked to reserve and publish them in one message.

It saves the writer's own round trip to the master, which for a small value is a third of the whole put. Not thread-safe: the node's
loop is the only caller.
"""

from collections.abc import Callable

from kvstore.protocol.catalog_messages import Claim
from kvstore.protocol.errors import KVStoreError, ProtocolError, Unavailable
from kvstore.protocol.frames import Header
from kvstore.protocol.master_messages import Grants
from kvstore.protocol.message import GRANTED, PRESENT
from kvstore.protocol.node_messages import ALREADY_THERE, ASK_AGAIN, STORED
from kvstore.rpc.session import Session
from kvstore.store.blocks.open_puts import OpenPut
from kvstore.store.blocks.table import BlockTable
from kvstore.store.caller import PutFrame
from kvstore.store.publisher import Publisher
from kvstore.store.puts.answering import Answers

Ask = Callable[[Claim, Callable[[Grants | KVStoreError], None]], None]
"""Sends a claim to the master and calls back once."""


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
        """Answer the Put once the master has decided. Raises Unavailable when there is no master; nothing is kept then."""
        wanted = [(at, put) for at, put in enumerate(frame.puts) if put is not None]
        if self._ask is None:
            self._abort([put for _, put in wanted])
            raise Unavailable("this node has no master now; try again")
        flags = bytearray(ALREADY_THERE if status == PRESENT else ASK_AGAIN for status in frame.statuses)
        answer = self._answers.once(session, header, flags)

        def decided(reply: Grants | KVStoreError) -> None:
            if isinstance(reply, Grants) and len(reply.statuses) != len(wanted):
                reply = ProtocolError("the master answered a Claim for other keys")
            if isinstance(reply, KVStoreError):
                self._abort([put for _, put in wanted])
                answer(reply)
                return
            for (at, put), status, generation in zip(wanted, reply.statuses, reply.generations, strict=True):
                flags[at] = self._settle(put, frame.checksums[at], status, generation)
            if self._table.events.is_recording:
                self._table.events.stored(first.tenant, [put.block for at, put in wanted if flags[at] == STORED])
            # What was there already may not be durable yet: "already there" is said once it is.
            self._publisher.when_published(frame.wait_seq, answer)

        blocks = [put.block for _, put in wanted]
        first = blocks[0]
        self._ask(
            Claim(
                self._epoch,
                first.tenant,
                first.namespace,
                [block.key for block in blocks],
                [block.size_bytes for block in blocks],
                [frame.checksums[at] for at, _ in wanted],
                [block.parent for block in blocks],
            ),
            decided,
        )

    def _settle(self, put: OpenPut, checksum: int, status: int, generation: int) -> int:
        """Carry out the master's decision on one put; its flag."""
        if status == GRANTED and self._table.is_open(put):
            self._table.commit_claimed(put, checksum, generation)
            return STORED
        self._table.abort(put)
        if status == GRANTED:  # it expired, or its writer left, while the master decided
            self._table.disown(put.block, generation)
            return ASK_AGAIN
        return ALREADY_THERE if status == PRESENT else ASK_AGAIN

    def _abort(self, puts: list[OpenPut]) -> None:
        for put in puts:
            self._table.abort(put)
