"""Questions to the master about blocks that are about to leave the node: whether another node holds them
(store/block_table/replicated_victims.py).

With them go the blocks that are to be spilled: the coldest of the lowest tier, named ahead of their eviction while it is nearly full. The
master chooses which node takes one, and that node fetches it; here it leaves first once the answer says that another node has it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvstore.protocol.catalog_messages import QueryVictims
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.session_messages import Flags
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.partitioning import Partitioning
from kvstore.store.block_table.tier_view import TierView

AHEAD_BLOCKS: Final = 1024
"""So many of the coldest are to be at others at once: what leaves while copies are made, at thousands of puts a second."""

AHEAD_SHARE: Final = 0.25
"""Of a tier's blocks at most: the rest is too warm to be copied on suspicion."""

MIN_PAUSE_NS: Final = 100_000_000
"""Between two questions as long as answers say that there is something new at others."""

MAX_PAUSE_NS: Final = 10_000_000_000
"""The same at most: doubled with each answer that says nothing new. With a full cluster of 1,000 nodes the master is asked about 100,000
keys a second."""

Ask = Callable[[QueryVictims, Callable[[Flags | KVStoreError], None]], None]
"""Sends a Coldest to the master and calls back once with its answer or an error."""


class VictimSpiller:
    """Of one tier. Not thread-safe: the node's loop is the only caller."""

    def __init__(self, lowest: TierView, *, clock_ns: Callable[[], int]) -> None:
        self._lowest = lowest
        self._clock_ns = clock_ns
        self._at_share = 0.0
        self._pause_ns = MIN_PAUSE_NS
        self._next_ns = 0
        self._elsewhere = 0
        """Of the blocks asked about last, those that others keep."""

    def begin(self, at_share: float) -> None:
        """With less than this share of the tier free blocks are to be spilled; 0: never."""
        self._at_share, self._pause_ns, self._next_ns, self._elsewhere = at_share, MIN_PAUSE_NS, 0, 0

    @property
    def is_short(self) -> bool:
        """Whether the tier is nearly full, and the operator wants blocks spilled."""
        tier = self._lowest.tier
        free_bytes = tier.capacity_bytes - tier.used_bytes - tier.quarantined_bytes
        return free_bytes < self._at_share * tier.capacity_bytes

    @property
    def ahead(self) -> int:
        """How many of the coldest blocks are to be at others."""
        return min(AHEAD_BLOCKS, max(1, int(AHEAD_SHARE * len(self._lowest))))

    def due_group(self) -> int | None:
        """The group whose coldest blocks the master is to be asked about now, ahead of their eviction."""
        now_ns = self._clock_ns()
        if not self._at_share or now_ns < self._next_ns or not self.is_short:
            return None
        self._next_ns = now_ns + self._pause_ns
        return self._lowest.coldest_group()

    def offered(self, blocks: Sequence[Block]) -> bytes:
        """A flag for each of a group's coldest blocks, 1: it is to be spilled unless others keep it; none where the tier has room."""
        if not self.is_short:
            return b""
        ahead = self.ahead
        return bytes(at < ahead and not block.is_guest for at, block in enumerate(blocks))

    def answered(self, flags: bytes) -> None:
        """What the master said of blocks asked about ahead of their eviction."""
        elsewhere = sum(flags)
        self._pause_ns = MIN_PAUSE_NS if elsewhere != self._elsewhere else min(2 * self._pause_ns, MAX_PAUSE_NS)
        self._elsewhere = elsewhere


class LastReplicaQueries:
    """Of the node's lowest tier. Not thread-safe: the node's loop is the only caller."""

    def __init__(self, lowest: TierView, partitioning: Partitioning, *, clock_ns: Callable[[], int]) -> None:
        self._lowest = lowest
        self._partitioning = partitioning
        self._clock_ns = clock_ns
        self._spilling = VictimSpiller(lowest, clock_ns=clock_ns)
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
            ask(QueryVictims(epoch, blocks[0].tenant, [blocks[at].key for at in of], spill), partial(answered, of))
        if not links:
            told()
