"""What the master is asked about blocks that are about to leave the node: whether they are the last copies (store/blocks/spares.py)."""

from collections.abc import Callable
from functools import partial

from kvstore.protocol.catalog_messages import Coldest
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.session_messages import Flags
from kvstore.store.blocks.block import Block
from kvstore.store.blocks.level import Level
from kvstore.store.blocks.partitioning import Partitioning
from kvstore.store.spilling import Spilling

Ask = Callable[[Coldest, Callable[[Flags | KVStoreError], None]], None]
"""Sends a Coldest to the master and calls back once with its answer or an error."""


class LastCopies:
    """Of the node's lowest tier. Not thread-safe: the node's loop is the only caller."""

    def __init__(self, lowest: Level, partitioning: Partitioning, *, clock_ns: Callable[[], int]) -> None:
        self._lowest = lowest
        self._partitioning = partitioning
        self._clock_ns = clock_ns
        self._spilling = Spilling(lowest, clock_ns=clock_ns)
        self._links: dict[int, tuple[Ask, int]] = {}
        """To the masters of partitions that answer this, with the registration's epoch."""
        self._round = 0
        """Rises with each change of a link: answers to questions of before count no more."""

    def link_up(self, ask: Ask, epoch: int, partition: int = 0, *, spill_at_share: float = 0.0) -> None:
        """There is a link to the partition's master, under this registration. With less than `spill_at_share` of the tier free it is told
        what is to be spilled; 0: never."""
        self.link_down(partition)
        self._links[partition] = ask, epoch
        self._spilling.begin(spill_at_share)

    def link_down(self, partition: int = 0) -> None:
        """Nobody knows what other nodes hold."""
        self._links.pop(partition, None)
        self._round += 1
        self._lowest.spares.forget()

    def step(self) -> None:
        """Called after every round of events: ask what is due."""
        if not self._links:
            return
        for group in self._lowest.spares.take_due():
            blocks = self._lowest.coldest(group)
            if blocks:
                self._ask_about(group, blocks)
            else:
                self._lowest.spares.told(group, (), b"", now_ns=self._clock_ns())

    def tick(self) -> None:
        """Called now and then."""
        self._lowest.spares.expire(now_ns=self._clock_ns())
        group = self._spilling.due_group() if self._links else None
        if group is None:
            return
        blocks = self._lowest.coldest(group, self._spilling.ahead)
        if blocks and self._lowest.spares.begin_asking(group):
            self._ask_about(group, blocks, then=self._spilling.answered)

    def _ask_about(self, group: int, blocks: list[Block], then: Callable[[bytes], None] = lambda _flags: None) -> None:
        """Ask the master of each partition about those of its keys; of one without a link nothing may leave first."""
        asked, current = [(block, block.last_access) for block in blocks], self._round
        offered, flags = self._spilling.offered(blocks), bytearray(len(blocks))
        places: dict[int, list[int]] = {}
        for at, block in enumerate(blocks):
            places.setdefault(self._partitioning.of(block.key), []).append(at)
        links = {partition: self._links[partition] for partition in places if partition in self._links}
        left = len(links)

        def answered(of: list[int], reply: Flags | KVStoreError) -> None:
            nonlocal left
            left -= 1
            if current != self._round:
                return
            if isinstance(reply, Flags) and len(reply.flags) == len(of):
                for at, flag in zip(of, reply.flags, strict=True):
                    flags[at] = flag
            if not left:
                told()

        def told() -> None:
            self._lowest.spares.told(group, asked, bytes(flags), now_ns=self._clock_ns())
            then(bytes(flags))

        for partition, (ask, epoch) in links.items():
            of = places[partition]
            spill = bytes(offered[at] for at in of) if offered else b""
            ask(Coldest(epoch, blocks[0].tenant, [blocks[at].key for at in of], spill), partial(answered, of))
        if not links:
            told()
