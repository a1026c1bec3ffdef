"""What the master is asked about blocks that are about to leave the node: whether they are the last copies (store/blocks/spares.py)."""

from collections.abc import Callable

from kvstore.protocol.catalog_messages import Coldest
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.session_messages import Flags
from kvstore.store.blocks.block import Block
from kvstore.store.blocks.level import Level
from kvstore.store.spilling import Spilling

Ask = Callable[[Coldest, Callable[[Flags | KVStoreError], None]], None]
"""Sends a Coldest to the master and calls back once with its answer or an error."""


class LastCopies:
    """Of the node's lowest tier. Not thread-safe: the node's loop is the only caller."""

    def __init__(self, lowest: Level, *, clock_ns: Callable[[], int]) -> None:
        self._lowest = lowest
        self._clock_ns = clock_ns
        self._spilling = Spilling(lowest, clock_ns=clock_ns)
        self._ask: Ask | None = None
        self._epoch = 0

    def link_up(self, ask: Ask, epoch: int, *, spill_at_share: float = 0.0) -> None:
        """There is a link to the master, under this registration. With less than `spill_at_share` of the tier free it is told what is to be
        spilled; 0: never."""
        self.link_down()
        self._ask, self._epoch = ask, epoch
        self._spilling.begin(spill_at_share)

    def link_down(self) -> None:
        """Nobody knows what other nodes hold."""
        self._ask, self._epoch = None, 0
        self._lowest.spares.forget()

    def step(self) -> None:
        """Called after every round of events: ask what is due."""
        ask = self._ask  # the first question may be what shows that the link is gone
        if ask is None:
            return
        for group in self._lowest.spares.take_due():
            blocks = self._lowest.coldest(group)
            if blocks:
                self._ask_about(ask, group, blocks)
            else:
                self._lowest.spares.told(group, (), b"", now_ns=self._clock_ns())

    def tick(self) -> None:
        """Called now and then."""
        self._lowest.spares.expire(now_ns=self._clock_ns())
        group = self._spilling.due_group() if self._ask is not None else None
        if self._ask is None or group is None:
            return
        blocks = self._lowest.coldest(group, self._spilling.ahead)
        if blocks and self._lowest.spares.begin_asking(group):
            self._ask_about(self._ask, group, blocks, then=self._spilling.answered)

    def _ask_about(self, ask: Ask, group: int, blocks: list[Block], then: Callable[[bytes], None] = lambda _flags: None) -> None:
        asked, epoch = [(block, block.last_access) for block in blocks], self._epoch

        def answered(reply: Flags | KVStoreError) -> None:
            if epoch != self._epoch:
                return
            flags = reply.flags if isinstance(reply, Flags) and len(reply.flags) == len(asked) else bytes(len(asked))
            self._lowest.spares.told(group, asked, flags, now_ns=self._clock_ns())
            then(flags)

        ask(Coldest(epoch, blocks[0].tenant, [block.key for block in blocks], self._spilling.offered(blocks)), answered)
