"""Copies of other nodes' blocks, by order of the master: a queue, one batch at a time, and the master's last word on each.

A copy is a put whose writer is this node: a slot in DRAM, invisible, filled by a thread (store/replication/replica_fetch.py). What has
arrived is
shown only once the master has said that the block is still the one it ordered, so that nothing removed or replaced meanwhile comes back. A
copy makes room as a put does, but goes behind its tenant's puts that wait for room, and is given up rather than wait for long. For a guest,
which its source has spilled, no room is made.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.protocol.catalog_messages import CopyBlocks, CopyResult
from kvstore.protocol.errors import Full, KVStoreError, ProtocolError, StaleHandle, Unavailable
from kvstore.protocol.session_messages import Flags, Hello
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.thread_pools import started
from kvstore.rpc.tracing import TraceSpan, call_within_spans
from kvstore.security.tls.certificates import Certificates
from kvstore.store.block_table.block import DRAM, Block, Loss
from kvstore.store.block_table.open_puts import OpenPut
from kvstore.store.block_table.table import BlockTable
from kvstore.store.block_table.uncommitted import UNDECIDED
from kvstore.store.config import NodeSettings
from kvstore.store.replication.replica_fetch import ReplicaBlock, SourceNode, SourceRates, fetch
from kvstore.store.wait_queue import WaitQueue
from kvstore.tiers.dram import DramTier
from kvstore.transfer.description import unpack_engine
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.path_chooser import MeasuredRate

BATCH_BLOCKS: Final = 1024
"""Blocks of one batch at most, however small: opening so many takes some milliseconds of the node's loop."""
ROOM_WAIT_NS: Final = 1_000_000_000
"""How long an order waits for room before it is given up."""

Ask = Callable[[CopyResult, Callable[[Flags | KVStoreError], None]], None]
"""Sends a Copied to the master and calls back once with its answer or an error."""

log = logging.getLogger("kvstore.store")


@dataclass(frozen=True, slots=True, eq=False)
class _CopyOrder:
    """What the blocks of one Copy have in common. `epoch` is the registration under which it came, `span` that of a Copy that is traced."""

    source: SourceNode
    hello: Hello
    namespace: str
    epoch: int
    are_guests: bool = False
    span: TraceSpan | None = None
    partition: int = 0
    """Whose master ordered it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """One block that is ordered."""

    order: _CopyOrder
    key: bytes
    size_bytes: int
    checksum: int
    generation: int
    parent: bytes


@dataclass(slots=True, eq=False)
class _CopyBatch:
    """Blocks of one order that are fetched together, and the owner of their puts. A block without a put is lost, for one of `errors`."""

    order: _CopyOrder
    items: list[_Item] = field(default_factory=list)
    puts: list[OpenPut | None] = field(default_factory=list)
    errors: list[KVStoreError] = field(default_factory=list)
    spans: list[TraceSpan] = field(default_factory=list)
    """From its begin to the master's last word, if its order is traced: one, or none."""

    def begin(self) -> None:
        if self.order.span is not None:
            self.spans.append(self.order.span.follow("kvstore.node.fetch_copies"))
            self.spans[0].set("kvstore.blocks", len(self.items))

    def end(self, error: str = "") -> None:
        for span in self.spans:
            span.end(error)

    def add(self, item: _Item, put: OpenPut | None) -> None:
        self.items.append(item)
        self.puts.append(put)


class ReplicaQueue:
    """Owns the thread. Not thread-safe: the node's loop is the only caller."""

    def __init__(
        self,
        reactor: Reactor,
        table: BlockTable,
        dram: DramTier,
        waiting: WaitQueue,
        *,
        settings: NodeSettings,
        engine: TransferEngine | None = None,
        tls: Certificates | None = None,
    ) -> None:
        """`engine` is the node's: without one all comes by message."""
        self._reactor = reactor
        self._table = table
        self._dram = dram
        self._waiting = waiting
        self._batch_bytes = settings.copy_batch
        self._queue_blocks = settings.copy_queue
        self._timeout_s = settings.copy_timeout_s
        self._engine = engine
        self._tls = tls
        self._queue: deque[_Item] = deque()
        self._put_off = 0
        """Blocks that are queued once those of their keys here are decided."""
        self._batch: _CopyBatch | None = None
        self._stuck_ns = 0
        """Since when the first in the queue lacks room; 0: it does not."""
        self._links: dict[int, tuple[Ask, int]] = {}
        """To the master of each partition, with the registration's epoch."""
        self.rates = SourceRates()
        self._thread = started(1, "copies")
        self.copied_blocks = 0
        self.copied_bytes = 0
        self.guests = 0
        """Of the blocks copied, those that their sources have spilled."""
        self.failed = 0
        """Blocks that were ordered and taken on, and did not become visible."""

    def __len__(self) -> int:
        """Blocks that wait or are under way."""
        return len(self._queue) + self._put_off + (len(self._batch.items) if self._batch is not None else 0)

    def counters(self) -> dict[str, int]:
        """For the node's status."""
        copied = {"copied_blocks": self.copied_blocks, "copied_bytes": self.copied_bytes, "guest_blocks": self.guests}
        return {**copied, "copies_failed": self.failed, "copies_waiting": len(self)}

    def link_up(self, ask: Ask, epoch: int, partition: int = 0) -> None:
        """There is a link to the partition's master, under this registration."""
        self.link_down(partition)
        self._links[partition] = ask, epoch

    def link_down(self, partition: int = 0) -> None:
        """The link broke, and with it go the orders that came by it: the master does not know them any more."""
        self._links.pop(partition, None)
        left = [item for item in self._queue if item.order.partition != partition]
        self.failed += len(self._queue) - len(left)
        if self._queue and left[:1] != [self._queue[0]]:
            self._stuck_ns = 0  # the one that lacked room is gone
        self._queue = deque(left)

    def _asks(self, order: _CopyOrder) -> Ask | None:
        """Where to report on the order; None: the link by which it came is gone."""
        ask, epoch = self._links.get(order.partition, (None, 0))
        return ask if epoch == order.epoch else None

    def take(self, message: CopyBlocks, hello: Hello, span: TraceSpan | None = None) -> bytes:
        """Queue what is neither here nor being written, as far as the queue goes; a flag a key. The source is told `hello`; `span` is the
        order's, if it is traced.

        What was put here and is undecided is taken on, too, and queued once it is decided: the cluster may have another version. To refuse
        it would have the master take this node for a full one.
        """
        source = SourceNode(message.source, message.host_id, message.unix, message.tcp, b"".join(message.transfer[:1]))
        _ask, epoch = self._links.get(hello.partition, (None, 0))
        order = _CopyOrder(source, hello, message.namespace, epoch, bool(message.spilled), span, hello.partition)
        columns = zip(message.keys, message.sizes, message.checksums, message.generations, message.parents, strict=True)
        flags, undecided = bytearray(), list[_Item]()
        for key, size, checksum, generation, parent in columns:
            block = self._table.find(message.tenant, key)
            is_undecided = block is not None and block.generation == UNDECIDED
            has_room = len(self._queue) + self._put_off + len(undecided) < self._queue_blocks
            is_taken = has_room and (is_undecided or self._is_absent(message.tenant, key))
            if is_taken:
                (undecided if is_undecided else self._queue).append(_Item(order, key, size, checksum, generation, parent))
            flags.append(is_taken)
        if undecided:
            self._put_off += len(undecided)
            self._table.undecided.when_decided(message.tenant, lambda: self._take_up(order, undecided))
        self.step()
        return bytes(flags)

    def _take_up(self, order: _CopyOrder, items: Sequence[_Item]) -> None:
        """What the node had of its own has been decided about: it is the block that was ordered, or is gone."""
        self._put_off -= len(items)
        _ask, epoch = self._links.get(order.partition, (None, 0))
        if order.epoch == epoch:
            self._queue.extend(items)
            self.step()
        else:
            self.failed += len(items)

    def step(self) -> None:
        """Begin the next batch if none is under way. Called whenever there may be room, and by the node's tick."""
        if self._batch is not None or not self._queue:
            return
        batch = self._next_batch()
        if batch is None and self._stuck_ns and self._reactor.now_ns() >= self._stuck_ns + ROOM_WAIT_NS:
            batch = self._give_up()
        if batch is None:
            self._stuck_ns = self._stuck_ns or self._reactor.now_ns()
            return
        self._stuck_ns = 0
        self._batch = batch
        try:
            self._begin(batch)
        except Exception as error:
            self._failed(batch, error)

    def close(self) -> None:
        """Wait for the batch under way, no longer than its deadline."""
        self._thread.shutdown(cancel_futures=True)

    # --- a batch ---

    def _begin(self, batch: _CopyBatch) -> None:
        """Have it fetched; one of which nothing could be opened is reported at once."""
        batch.begin()
        wanted = [
            ReplicaBlock(item.key, item.generation, item.checksum, self._dram.view(put.slot))
            for item, put in zip(batch.items, batch.puts, strict=True)
            if put is not None
        ]
        if wanted:
            self._thread.submit(self._work, batch, wanted)
        else:
            self._report(batch)

    def _next_batch(self) -> _CopyBatch | None:
        """The first blocks of the queue, with their slots. None: there is no room for the first, or puts of its tenant wait for room."""
        if self._waiting.has(self._queue[0].order.hello.tenant):
            return None
        batch, left_bytes = _CopyBatch(self._queue[0].order), self._batch_bytes
        while self._queue and self._queue[0].order is batch.order and len(batch.items) < BATCH_BLOCKS:
            item = self._queue[0]
            if batch.items and item.size_bytes > left_bytes:
                break
            put = None
            try:
                put = self._open(item, batch)
            except KVStoreError as error:
                batch.errors.append(error)
            else:
                if put is None:
                    break
            self._queue.popleft()
            batch.add(item, put)
            left_bytes -= item.size_bytes
        return batch if batch.items else None

    def _open(self, item: _Item, batch: _CopyBatch) -> OpenPut | None:
        """A put for the block; None: no room now. Raises StaleHandle: it has come by another way, QuotaExceeded: its tenant has all that it
        may, and waits for room with its puts only, and whatever else the table has against it."""
        tenant = item.order.hello.tenant
        if not self._is_absent(tenant, item.key):
            raise StaleHandle("the block has been put here meanwhile")
        block = self._table.rows.make(tenant, item.key, item.size_bytes, item.generation, item.order.namespace, item.parent)
        if item.order.are_guests:
            return self._open_guest(block, batch)
        put = self._table.open(block, batch, now_ns=self._reactor.now_ns())
        if put is None and (exceeded := self._table.quotas.exceeded(tenant, item.size_bytes)) is not None:
            raise exceeded
        return put

    def _open_guest(self, block: Block, batch: _CopyBatch) -> OpenPut:
        """A put for which nobody leaves. Raises Full: there is no slot to spare, or its tenant's quota leaves none."""
        slot = self._table.slots.guest_slot(block.tenant, block.size_bytes)
        if slot is None:
            raise Full("no slot is free for what another node spills")
        block.is_guest = True
        return self._table.open_at(block, slot, batch, now_ns=self._reactor.now_ns())

    def _give_up(self) -> _CopyBatch:
        """What is left of the first order: a batch without puts."""
        batch = _CopyBatch(self._queue[0].order)
        while self._queue and self._queue[0].order is batch.order:
            batch.add(self._queue.popleft(), None)
        batch.errors.append(Full(f"no room was freed within {ROOM_WAIT_NS / 1e9:g} s"))
        return batch

    def _work(self, batch: _CopyBatch, wanted: Sequence[ReplicaBlock]) -> None:
        """In the thread."""
        results: list[int | KVStoreError]
        try:
            order, deadline = batch.order, Deadline(self._timeout_s)
            results = call_within_spans(batch.spans, fetch, order.source, order.hello, wanted, deadline, self._engine, self._tls)
        except KVStoreError as error:
            results = [error] * len(wanted)
        except Exception as error:
            log.exception("fetching blocks of another node failed")
            results = [Unavailable(f"internal error: {type(error).__name__}: {error}")] * len(wanted)
        # Also where it failed: a path too slow for a batch is the one whose rate the scheduler must know.
        measured = self._measured(batch.order.source)
        self._reactor.call_soon(lambda: self._fetched(batch, results, measured))

    def _measured(self, source: SourceNode) -> MeasuredRate | None:
        """What the engine knows of the way to a source; None too where all came by message."""
        if self._engine is None or not source.transfer:
            return None
        try:
            return self._engine.measured(unpack_engine(source.transfer).name)
        except ProtocolError:  # nor can it be reached so
            return None

    def _fetched(self, batch: _CopyBatch, results: Sequence[int | KVStoreError], measured: MeasuredRate | None) -> None:
        self.rates.note(batch.order.source.node_id, measured)
        try:
            self._sort_out(batch, results)
            self._report(batch)
        except Exception as error:
            self._failed(batch, error)

    def _failed(self, batch: _CopyBatch, error: Exception) -> None:
        """By a fault of ours, which must not hold up the queue."""
        log.error("a batch of copies failed", exc_info=error)
        if self._batch is batch:
            self._decided(batch, Unavailable(f"internal error: {type(error).__name__}: {error}"))

    def _sort_out(self, batch: _CopyBatch, results: Sequence[int | KVStoreError]) -> None:
        """Forget what has not arrived."""
        opened = [index for index, put in enumerate(batch.puts) if put is not None]
        for index, result in zip(opened, results, strict=True):
            put = batch.puts[index]
            assert put is not None
            if not isinstance(result, KVStoreError) and not self._table.puts.holds(put):
                result = StaleHandle("its slot was taken back before it arrived: put_ttl_s is over")
            if isinstance(result, KVStoreError):
                self._table.abort(put)
                batch.puts[index] = None
                batch.errors.append(result)
            elif result != batch.items[index].checksum:
                put.block.set_loss(DRAM, Loss(result))

    def _report(self, batch: _CopyBatch) -> None:
        """Tell the master what has arrived, and what has not."""
        items, order = batch.items, batch.order
        if batch.errors:
            error, lost = batch.errors[0], batch.puts.count(None)
            log.warning("%d of %d blocks not copied from node %d: %s: %s", lost, len(items), order.source.node_id, _name(error), error)
        ask = self._asks(order)
        if ask is None:
            self._decided(batch, Unavailable("the link over which the copies were ordered is gone"))
            return
        arrived = bytes(put is not None for put in batch.puts)
        message = CopyResult(order.epoch, order.hello.tenant, [item.key for item in items], [item.generation for item in items], arrived)
        call_within_spans(batch.spans, ask, message, lambda reply: self._decided(batch, reply))

    def _decided(self, batch: _CopyBatch, reply: Flags | KVStoreError) -> None:
        """Show what the master says may be seen, and forget the rest; whatever is raised, the next batch can begin."""
        try:
            self._settle(batch, reply)
        finally:
            self._batch = None
            batch.end(_name(reply) if isinstance(reply, KVStoreError) else _name(batch.errors[0]) if batch.errors else "")
            for put in batch.puts:
                if put is not None:
                    self._table.abort(put)  # nothing to one that was shown
            batch.puts, batch.errors = [], []  # they refer to it
        self._waiting.retry()
        self._reactor.call_soon(self.step)  # not now: a link that has just ended answers at once, and each answer would stand on the last

    def _settle(self, batch: _CopyBatch, reply: Flags | KVStoreError) -> None:
        if isinstance(reply, Flags) and len(reply.flags) != len(batch.items):
            reply = ProtocolError("the master answered a Copied for other keys")
        flags = reply.flags if isinstance(reply, Flags) else bytes(len(batch.items))
        refused = 0
        for item, put, flag in zip(batch.items, batch.puts, flags, strict=True):
            if put is not None and flag and self._table.puts.holds(put):
                self._table.commit_claimed(put, item.checksum, item.generation)
                self._table.enter_claimed(put.block)
                self.copied_blocks += 1
                self.copied_bytes += item.size_bytes
                self.guests += put.block.is_guest
                continue
            self.failed += 1
            if put is None:
                continue
            refused += 1
            self._table.abort(put)
            if flag:  # it expired while the master decided
                self._table.disown(put.block, item.generation)
        if refused:
            why = f"{_name(reply)}: {reply}" if isinstance(reply, KVStoreError) else "removed or replaced meanwhile"
            log.warning("%d of %d blocks copied from node %d are dropped: %s", refused, len(flags), batch.order.source.node_id, why)

    def _is_absent(self, tenant: str, key: bytes) -> bool:
        return self._table.find(tenant, key) is None and self._table.puts.of_key(tenant, key) is None


def _name(error: KVStoreError) -> str:
    return type(error).__name__
