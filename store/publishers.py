"""A publisher for each partition of the key space: every block's events go to the one of its key, to be said to the master that owns it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from kvstore.protocol.errors import KVStoreError
from kvstore.rpc.tracing import Span
from kvstore.store.blocks.block import Block
from kvstore.store.blocks.partitioning import Partitioning
from kvstore.store.blocks.rows import decided
from kvstore.store.blocks.waits import never
from kvstore.store.publisher import Published, Publisher

PART_BLOCKS: Final = 4_096
"""Of an inventory, looked at in one turn of the loop: 4 ms."""

Parts = Callable[[], Iterator[Sequence[Block]]]
Make = Callable[[Parts], Publisher]
"""Makes the publisher of the blocks that are told, in parts, when asked for."""


class Publishers:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(self, blocks: Callable[[], Iterable[Block]], partitioning: Partitioning, make: Make) -> None:
        """`blocks` gives all visible ones. What the master has not decided about is claimed, and in no inventory."""
        self._blocks = blocks
        self._partitioning = partitioning
        self._make = make
        self._each = [make(self._of(0))]

    def __getitem__(self, partition: int) -> Publisher:
        return self._each[partition]

    def cut(self) -> None:
        """The partitions are known: nothing has been said yet, so that nobody waits for what has changed its publisher. What moved before
        had a number of the first publisher's, which says nothing at its own."""
        if len(self._each) < self._partitioning.count:
            for block in self._blocks():
                if block.event_seq and self._partitioning.of(block.key):
                    block.event_seq = 0
        self._each += [self._make(self._of(partition)) for partition in range(len(self._each), self._partitioning.count)]

    def _of(self, partition: int) -> Parts:
        of = self._partitioning.of

        def parts(blocks: list[Block]) -> Iterator[Sequence[Block]]:
            for begin in range(0, len(blocks), PART_BLOCKS):
                part = decided(blocks[begin : begin + PART_BLOCKS])
                yield part if self._partitioning.count == 1 else [block for block in part if of(block.key) == partition]

        return lambda: parts(list(self._blocks()))

    def emit(self, kind: int, block: Block) -> None:
        """The table's `emit`."""
        self._each[self._partitioning.of(block.key)].emit(kind, block)

    def when_published(
        self, blocks: Sequence[Block], callback: Published, span: Span | None = None, *, is_over: Callable[[], bool] = never
    ) -> None:
        """Call back when the newest events of these blocks are durable at their masters; at once if they are. See
        Publisher.when_published."""
        groups = self._partitioning.group(blocks)
        waiting = _Waiting(len(groups), callback)
        for partition, group in groups.items():
            publisher, told = self._each[partition], callback if len(groups) == 1 else waiting.told
            awaited = [block for block in group if block.event_seq > publisher.durable_seq]
            events = [block.event_seq for block in awaited]
            publisher.when_published(max(events, default=0), told, span, oldest=min(events, default=0), blocks=awaited, is_over=is_over)
        if not groups:
            callback(None)

    def are_published(self, blocks: Sequence[Block]) -> bool:
        """The newest events of these blocks are durable at their masters."""
        return all(self._each[self._partitioning.of(block.key)].is_published(block.event_seq, block.event_seq) for block in blocks)

    @property
    def is_synced(self) -> bool:
        """Every partition's master has the inventory of its link."""
        return all(one.is_synced for one in self._each)

    @property
    def backlog(self) -> int:
        """Events that masters have not made durable yet."""
        return sum(one.backlog for one in self._each)

    def flush(self) -> None:
        for one in self._each:
            one.flush()

    def flush_now(self) -> None:
        for one in self._each:
            one.flush_now()

    def close(self) -> None:
        """Nothing more will be published: who waits is told."""
        for one in self._each:
            one.close()


class _Waiting:
    """For several publishers, of which the first error is told, if any."""

    def __init__(self, count: int, then: Published) -> None:
        self._left = count
        self._then = then
        self._error: KVStoreError | None = None

    def told(self, error: KVStoreError | None) -> None:
        self._left -= 1
        self._error = self._error or error
        if not self._left:
            self._then(self._error)
