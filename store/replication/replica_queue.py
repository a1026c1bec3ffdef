"""Replicas copied from other nodes by order of the masters: one queue per tenant, one batch at a time. The master
confirms each.

A copy is a put whose writer is this node: an invisible DRAM slot, filled by a thread (replica_fetch.py). It becomes
visible only after the master confirms that the block is still the ordered one, so removed or replaced blocks do not
return. A copy evicts as a put does, but waits behind its tenant's queued puts, for at most ROOM_WAIT_NS.

If a batch does not reach its source in time, the queued orders from that node end with it: each would take as long.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.protocol.catalog_messages import COPY_REASONS, COPY_REPLICA, CopyBlocks, CopyResult
from kvstore.protocol.errors import DeadlineExceeded, Full, KVStoreError, ProtocolError, StaleHandle, Unavailable
from kvstore.protocol.node_messages import NO_PRIORITY
from kvstore.protocol.retention import PRIORITIES, unpack_hints
from kvstore.protocol.session_messages import Flags, Hello
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.thread_pools import started
from kvstore.rpc.tracing import TraceSpan, call_within_spans
from kvstore.security.tls.certificates import Certificates
from kvstore.store.block_table.block import DRAM, Loss
from kvstore.store.block_table.open_puts import OpenPut
from kvstore.store.block_table.retention import CopiedHint
from kvstore.store.block_table.table import BlockTable
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.config import NodeSettings
from kvstore.store.replication.replica_fetch import ReplicaBlock, SourceNode, SourceRates, fetch
from kvstore.store.wait_queue import WaitQueue
from kvstore.tiers.dram import DramTier
from kvstore.transfer.description import unpack_engine
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.path_chooser import MeasuredRate

BATCH_BLOCKS: Final = 1024
"""Blocks per batch: opening them takes some milliseconds of the loop."""
ROOM_WAIT_NS: Final = 1_000_000_000
"""Time for which a tenant's first order waits for a free slot."""
UNREACHABLE: Final = (Unavailable, DeadlineExceeded)
"""Errors of all blocks of a batch whose source cannot be reached, or does not respond in time."""

SendResult = Callable[[CopyResult, Callable[[Flags | KVStoreError], None]], None]
"""Sends a CopyResult to the master and calls back once."""

log = logging.getLogger("kvstore.store")


@dataclass(slots=True, eq=False)
class _CopyOrder:
    """Common fields of the blocks of one CopyBlocks. `epoch` is its registration's; `span` its span if it is traced;
    `reason` one of COPY_...."""

    source: SourceNode
    hello: Hello
    namespace: str
    epoch: int
    span: TraceSpan | None = None
    partition: int = 0
    """Partition of the ordering master."""
    reason: int = COPY_REPLICA
    failure: KVStoreError | None = None
    """Why its queued blocks are not fetched: an earlier batch did not reach the source."""


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """Ordered block."""

    order: _CopyOrder
    key: bytes
    size_bytes: int
    checksum: int
    generation: int
    parent: bytes


@dataclass(slots=True, eq=False)
class _CopyBatch:
    """Blocks of one order fetched together, and the owner of their puts. A block without a put has failed, with one of
    `errors`."""

    order: _CopyOrder
    items: list[_Item] = field(default_factory=list)
    puts: list[OpenPut | None] = field(default_factory=list)
    errors: list[KVStoreError] = field(default_factory=list)
    hints: dict[bytes, list[CopiedHint]] = field(default_factory=dict)
    """By key: retention hints at the source."""
    spans: list[TraceSpan] = field(default_factory=list)
    """The batch's span if its order is traced; one or none."""

    def begin(self) -> None:
        if self.order.span is not None:
            self.spans.append(self.order.span.follow("kvstore.node.fetch_copies"))
            self.spans[0].set("kvstore.blocks", len(self.items))

    def end(self, error: str = "") -> None:
        for span in self.spans:
            span.end(error)

    def note_hints(self, requested: Sequence[ReplicaBlock], hints: bytes) -> None:
        """Called in the fetch thread, before the batch is settled. Raises ProtocolError."""
        for index, priority, ttl_ms, session in unpack_hints(hints):
            if index < len(requested) and (priority <= PRIORITIES or priority == NO_PRIORITY):
                self.hints.setdefault(requested[index].key, []).append((priority, ttl_ms, session))

    def add(self, item: _Item, put: OpenPut | None) -> None:
        self.items.append(item)
        self.puts.append(put)


@dataclass(slots=True, eq=False)
class _TenantQueue:
    """A tenant's ordered blocks. `stuck_ns`: since when the first lacks a slot; 0: it does not."""

    items: deque[_Item] = field(default_factory=deque)
    stuck_ns: int = 0


class ReplicaQueue:
    """Queue of ordered replicas. Owns the fetch thread. Not thread-safe: called from the node's loop."""

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
        """`engine` is the node's; without one all blocks come by message."""
        self._reactor = reactor
        self._table = table
        self._dram = dram
        self._waiting = waiting
        self._batch_bytes = settings.copy_batch
        self._queue_blocks = settings.copy_queue
        self._timeout_s = settings.copy_timeout_s
        self._engine = engine
        self._tls = tls
        self._queues: OrderedDict[str, _TenantQueue] = OrderedDict()
        """By tenant; the next one first. None is empty."""
        self._deferred = 0
        """Blocks that are queued once this node's own uncommitted blocks of their keys are committed."""
        self._batch: _CopyBatch | None = None
        self._links: dict[int, tuple[SendResult, int]] = {}
        """By partition: the master's report function, and the registration epoch."""
        self.rates = SourceRates()
        self._thread = started(1, "copies")
        self.copied_blocks = [0] * len(COPY_REASONS)
        """By reason, as `copied_bytes`."""
        self.copied_bytes = [0] * len(COPY_REASONS)
        self.failed = 0
        """Accepted blocks that did not become visible."""

    def __len__(self) -> int:
        """Number of blocks waiting or in progress."""
        return self._queued + (len(self._batch.items) if self._batch is not None else 0)

    @property
    def _queued(self) -> int:
        return self._deferred + sum(len(line.items) for line in self._queues.values())

    def counters(self) -> dict[str, int]:
        """Counters for the node's status."""
        found = {"copied_blocks": sum(self.copied_blocks), "copied_bytes": sum(self.copied_bytes)}
        for reason, blocks, size_bytes in zip(COPY_REASONS, self.copied_blocks, self.copied_bytes, strict=True):
            found[f"copied_blocks_{reason}"], found[f"copied_bytes_{reason}"] = blocks, size_bytes
        return {**found, "copies_failed": self.failed, "copies_waiting": len(self)}

    def link_up(self, ask: SendResult, epoch: int, partition: int = 0) -> None:
        """Report results to the partition's master over a new link."""
        self.link_down(partition)
        self._links[partition] = ask, epoch

    def link_down(self, partition: int = 0) -> None:
        """Drop the orders of a lost link: the master no longer tracks them."""
        self._links.pop(partition, None)
        for tenant, line in list(self._queues.items()):
            left = deque(item for item in line.items if item.order.partition != partition)
            self._dropped(tenant, [item.key for item in line.items if item.order.partition == partition])
            if not left:
                del self._queues[tenant]
            elif left[0] is not line.items[0]:
                line.stuck_ns = 0  # the stuck block was dropped
            line.items = left

    def _sender_of(self, order: _CopyOrder) -> SendResult | None:
        """Return the report function of the order's link; None if that link is lost."""
        ask, epoch = self._links.get(order.partition, (None, 0))
        return ask if epoch == order.epoch else None

    def take(self, message: CopyBlocks, hello: Hello, span: TraceSpan | None = None) -> bytes:
        """Queue blocks that are absent here, up to the queue's limit; return a flag per key. `hello` is sent to the
        source.

        Keys with an uncommitted block here are accepted too and queued once it is committed, because the cluster may
        have another version. Refusing them would mark this node as full. Raises ProtocolError for an unknown reason.
        """
        if message.reason >= len(COPY_REASONS):
            raise ProtocolError(f"CopyBlocks has reason {message.reason}; the highest known is {len(COPY_REASONS) - 1}")
        source = SourceNode(message.source, message.host_id, message.unix, message.tcp, b"".join(message.transfer[:1]))
        _ask, epoch = self._links.get(hello.partition, (None, 0))
        order = _CopyOrder(source, hello, message.namespace, epoch, span, hello.partition, message.reason)
        columns = zip(message.keys, message.sizes, message.checksums, message.generations, message.parents, strict=True)
        flags, wanted, uncommitted, queued = bytearray(), list[_Item](), list[_Item](), self._queued
        for key, size, checksum, generation, parent in columns:
            block = self._table.find(message.tenant, key)
            is_uncommitted = block is not None and block.generation == UNCOMMITTED
            has_space = queued + len(wanted) + len(uncommitted) < self._queue_blocks
            is_taken = has_space and (is_uncommitted or self._is_absent(message.tenant, key))
            is_taken = is_taken and self._table.prefetched.admit_copy(message.tenant, key, size)
            if is_taken:
                (uncommitted if is_uncommitted else wanted).append(_Item(order, key, size, checksum, generation, parent))
            flags.append(is_taken)
        self._enqueue(message.tenant, wanted)
        if uncommitted:
            self._deferred += len(uncommitted)
            self._table.uncommitted.when_committed(message.tenant, lambda: self._take_up(order, uncommitted))
        self.step()
        return bytes(flags)

    def _enqueue(self, tenant: str, items: Sequence[_Item]) -> None:
        if items:
            self._queues.setdefault(tenant, _TenantQueue()).items.extend(items)

    def _take_up(self, order: _CopyOrder, items: Sequence[_Item]) -> None:
        """Queue deferred blocks: the node's own ones were committed or dropped."""
        self._deferred -= len(items)
        _ask, epoch = self._links.get(order.partition, (None, 0))
        if order.epoch == epoch:
            self._enqueue(order.hello.tenant, items)
            self.step()
        else:
            self._dropped(order.hello.tenant, [item.key for item in items])

    def _dropped(self, tenant: str, keys: Sequence[bytes]) -> None:
        self.failed += len(keys)
        self._table.prefetched.forget_copies(tenant, keys)

    def step(self) -> None:
        """Begin the next batch if none is in progress, of the tenants in turn. Called when slots may be free, and
        periodically."""
        if self._batch is not None or not self._queues:
            return
        batch = next(filter(None, (self._next_of(tenant) for tenant in list(self._queues))), None)
        if batch is None:
            return
        self._batch = batch
        try:
            self._begin(batch)
        except Exception as error:
            self._failed(batch, error)

    def close(self) -> None:
        """Wait for the batch in progress, at most until its deadline."""
        self._thread.shutdown(cancel_futures=True)

    # --- a batch ---

    def _begin(self, batch: _CopyBatch) -> None:
        """Fetch the batch; report at once if no put could be opened."""
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

    def _next_of(self, tenant: str) -> _CopyBatch | None:
        """Return the tenant's next batch; without puts if the order is given up. None: it has to wait for a slot."""
        line, now_ns = self._queues[tenant], self._reactor.now_ns()
        order = line.items[0].order
        if order.failure is not None:
            batch = _given_up(line.items, order.failure)
        elif (opened := self._opened(tenant, line.items)) is not None:
            batch = opened
        elif not line.stuck_ns or now_ns < line.stuck_ns + ROOM_WAIT_NS:
            line.stuck_ns = line.stuck_ns or now_ns
            return None
        else:
            batch = _given_up(line.items, Full(f"no slot became free within {ROOM_WAIT_NS / 1e9:g} s"))
        line.stuck_ns = 0
        self._queues.move_to_end(tenant)
        if not line.items:
            del self._queues[tenant]
        return batch

    def _opened(self, tenant: str, queue: deque[_Item]) -> _CopyBatch | None:
        """Take the first queued blocks, with their slots. None: no free slot for the first, or puts of the tenant
        wait."""
        if self._waiting.has(tenant):
            return None
        batch, left_bytes = _CopyBatch(queue[0].order), self._batch_bytes
        while queue and queue[0].order is batch.order and len(batch.items) < BATCH_BLOCKS:
            item = queue[0]
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
            queue.popleft()
            batch.add(item, put)
            left_bytes -= item.size_bytes
        return batch if batch.items else None

    def _open(self, item: _Item, batch: _CopyBatch) -> OpenPut | None:
        """Open a put for the block; None: no free slot now. Raises StaleHandle (the block exists by now), QuotaExceeded
        (only puts wait for a quota), or the table's errors."""
        tenant = item.order.hello.tenant
        if not self._is_absent(tenant, item.key):
            raise StaleHandle("the block was stored here meanwhile")
        block = self._table.rows.make(tenant, item.key, item.size_bytes, item.generation, item.order.namespace, item.parent)
        put = self._table.open(block, batch, now_ns=self._reactor.now_ns())
        if put is None and (exceeded := self._table.quotas.exceeded(tenant, item.size_bytes)) is not None:
            raise exceeded
        return put

    def _work(self, batch: _CopyBatch, wanted: Sequence[ReplicaBlock]) -> None:
        """Fetch in the thread."""
        results: list[int | KVStoreError]
        try:
            order, deadline = batch.order, Deadline(self._timeout_s)
            results = call_within_spans(
                batch.spans, fetch, order.source, order.hello, wanted, deadline, self._engine, self._tls, batch.note_hints
            )
        except KVStoreError as error:
            results = [error] * len(wanted)
        except Exception as error:
            log.exception("fetching blocks from another node failed")
            results = [Unavailable(f"internal error: {type(error).__name__}: {error}")] * len(wanted)
        # Also after a failure: the scheduler needs the rate of slow paths most.
        measured = self._measured(batch.order.source)
        self._reactor.call_soon(lambda: self._fetched(batch, results, measured))

    def _measured(self, source: SourceNode) -> MeasuredRate | None:
        """Return the engine's measured rate to a source, if any."""
        if self._engine is None or not source.transfer:
            return None
        try:
            return self._engine.measured(unpack_engine(source.transfer).name)
        except ProtocolError:  # not reachable by the engine either
            return None

    def _fetched(self, batch: _CopyBatch, results: Sequence[int | KVStoreError], measured: MeasuredRate | None) -> None:
        self.rates.note(batch.order.source.node_id, measured)
        if isinstance(error := results[0], UNREACHABLE) and all(isinstance(result, UNREACHABLE) for result in results):
            self._fail_orders_from(batch.order.source, error)
        try:
            self._sort_out(batch, results)
            self._report(batch)
        except Exception as error:
            self._failed(batch, error)

    def _fail_orders_from(self, source: SourceNode, error: KVStoreError) -> None:
        """Mark the queued orders from an unreachable node as failed."""
        for line in self._queues.values():
            for order in dict.fromkeys(item.order for item in line.items):
                if order.source == source:
                    order.failure = error

    def _failed(self, batch: _CopyBatch, error: Exception) -> None:
        """End the batch after an internal error, so that the queue proceeds."""
        log.error("a batch of copies failed", exc_info=error)
        if self._batch is batch:
            self._decided(batch, Unavailable(f"internal error: {type(error).__name__}: {error}"))

    def _sort_out(self, batch: _CopyBatch, results: Sequence[int | KVStoreError]) -> None:
        """Abort the puts of blocks that were not fetched."""
        opened = [index for index, put in enumerate(batch.puts) if put is not None]
        for index, result in zip(opened, results, strict=True):
            put = batch.puts[index]
            assert put is not None
            if not isinstance(result, KVStoreError) and not self._table.puts.holds(put):
                result = DeadlineExceeded("its slot expired before it arrived (put_ttl_s)")
            if isinstance(result, KVStoreError):
                self._table.abort(put)
                batch.puts[index] = None
                batch.errors.append(result)
            elif result != batch.items[index].checksum:
                put.block.set_loss(DRAM, Loss(result))

    def _report(self, batch: _CopyBatch) -> None:
        """Report fetched and failed blocks to the master."""
        items, order = batch.items, batch.order
        if batch.errors:
            error, lost = batch.errors[0], batch.puts.count(None)
            # Copies race with evictions at their source: a block that is gone there is no fault.
            level = logging.INFO if all(isinstance(one, StaleHandle) for one in batch.errors) else logging.WARNING
            log.log(level, "%d of %d blocks not copied from node %d: %s: %s", lost, len(items), order.source.node_id, _name(error), error)
        ask = self._sender_of(order)
        if ask is None:
            self._decided(batch, Unavailable("the link that ordered the copies was lost"))
            return
        arrived = bytes(put is not None for put in batch.puts)
        message = CopyResult(order.epoch, order.hello.tenant, [item.key for item in items], [item.generation for item in items], arrived)
        call_within_spans(batch.spans, ask, message, lambda reply: self._decided(batch, reply))

    def _decided(self, batch: _CopyBatch, reply: Flags | KVStoreError) -> None:
        """Apply the master's reply. The next batch begins even after an exception."""
        try:
            self._settle(batch, reply)
        finally:
            self._batch = None
            batch.end(_name(reply) if isinstance(reply, KVStoreError) else _name(batch.errors[0]) if batch.errors else "")
            for put in batch.puts:
                if put is not None:
                    self._table.abort(put)  # no-op for visible blocks
            batch.puts, batch.errors = [], []  # they refer to it
        self._waiting.retry()
        self._reactor.call_soon(self.step)  # not now: a closed link answers at once, which would recurse

    def _settle(self, batch: _CopyBatch, reply: Flags | KVStoreError) -> None:
        if isinstance(reply, Flags) and len(reply.flags) != len(batch.items):
            reply = ProtocolError("the master answered CopyResult with a wrong number of flags")
        flags = reply.flags if isinstance(reply, Flags) else bytes(len(batch.items))
        refused = 0
        for item, put, flag in zip(batch.items, batch.puts, flags, strict=True):
            if put is not None and flag and self._table.puts.holds(put):
                self._table.commit_granted(put, item.checksum, item.generation)
                self._table.enter_granted(put.block)
                self._table.prefetched.copied(put.block, self._reactor.now_ns())
                if batch.hints:
                    self._table.retention.adopt(put.block, batch.hints.get(item.key, ()), self._reactor.now_ns())
                self.copied_blocks[item.order.reason] += 1
                self.copied_bytes[item.order.reason] += item.size_bytes
                continue
            self.failed += 1
            self._table.prefetched.forget_copies(batch.order.hello.tenant, [item.key])
            if put is None:
                continue
            refused += 1
            self._table.abort(put)
            if flag:  # it expired meanwhile
                self._table.retract(put.block, item.generation)
        if refused:
            why = f"{_name(reply)}: {reply}" if isinstance(reply, KVStoreError) else "removed or replaced meanwhile"
            log.warning("dropped %d of %d blocks copied from node %d: %s", refused, len(flags), batch.order.source.node_id, why)

    def _is_absent(self, tenant: str, key: bytes) -> bool:
        return self._table.find(tenant, key) is None and self._table.puts.of_key(tenant, key) is None


def _given_up(queue: deque[_Item], error: KVStoreError) -> _CopyBatch:
    """Take the rest of the first order, as a batch without puts."""
    batch = _CopyBatch(queue[0].order)
    while queue and queue[0].order is batch.order:
        batch.add(queue.popleft(), None)
    batch.errors.append(error)
    return batch


def _name(error: KVStoreError) -> str:
    return type(error).__name__
