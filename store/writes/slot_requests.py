"""Allocation of slots for the keys of one request, and the queue for requests that get none.

A request that does not fit whole is granted in part; the rest is answered BUSY ("ask again"). It holds no slots while
it waits, so two large batches cannot deadlock. A request that is granted nothing waits behind others of its tenant
until its deadline and fails with Full or QuotaExceeded. After `demotion_wait_s` the coldest blocks are evicted for it
even if no lower tier holds them.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.protocol.errors import Full, InvalidArgument, KVStoreError, QuotaExceeded
from kvstore.protocol.frames import MAX_VALUE_BYTES, FrameHeader
from kvstore.protocol.message import BUSY, GRANTED, PRESENT
from kvstore.protocol.node_messages import ACK_NODE_NO_WAIT, NODE_ACKS, OpenSlots, Put
from kvstore.rpc.server.session import Session
from kvstore.rpc.tracing import TraceSpan
from kvstore.store.block_table.open_puts import OpenBatch, OpenPut
from kvstore.store.block_table.table import BlockTable
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.session_authenticator import Caller, peer_of
from kvstore.store.wait_queue import WaitingRequest, WaitQueue, begin_child_span, until_ns
from kvstore.tiers.tier import Slot

MIN_WHOLE = 16
"""Smallest batch opened as a whole. Fewer keys are as fast one by one."""
MAX_NAMESPACE_BYTES = 255
"""Limit of a text column in Publish."""


class OpenResult(NamedTuple):
    """Result of a request: per key GRANTED, PRESENT or BUSY and the open put if granted, or a batch granted whole."""

    statuses: bytearray
    puts: list[OpenPut | None]
    batch: OpenBatch | None = None


class SlotAllocator:
    """Opens puts for requests. Not thread-safe: called from the node's loop."""

    def __init__(self, table: BlockTable, waiting: WaitQueue, *, demotion_wait_s: float) -> None:
        """`demotion_wait_s`: how long a request waits before blocks that no lower tier holds are evicted for it."""
        self.table = table
        self.waiting = waiting
        self.demotion_wait_s = demotion_wait_s

    def check(self, message: OpenSlots | Put, tenant: str) -> None:
        """Raises InvalidArgument for a request that can never succeed, QuotaExceeded if the tenant's quota can never
        hold a value."""
        sizes = message.sizes
        if sizes and not (1 <= min(sizes) and max(sizes) <= MAX_VALUE_BYTES):
            raise InvalidArgument(f"value sizes must be 1 to {MAX_VALUE_BYTES} bytes; got {min(sizes)} to {max(sizes)}")
        if len(message.namespace) > MAX_NAMESPACE_BYTES or len(message.namespace.encode()) > MAX_NAMESPACE_BYTES:
            raise InvalidArgument(f"namespace is too long: at most {MAX_NAMESPACE_BYTES} bytes")
        if isinstance(message, Put) and message.ack in NODE_ACKS and any(message.generations):
            raise InvalidArgument("a reserved put is acknowledged by the master: use ack 0")
        if sizes:
            self.table.check_size(max(sizes), tenant)

    def open(self, session: Session, tenant: str, message: OpenSlots | Put, *, may_open: bool, may_drop: bool) -> OpenResult | None:
        """Open the puts that get a slot now. After the first key without a slot no further one is tried: the order is
        the writer's priority.

        Returns None if the request must wait; nothing is open then. `may_open` is False if earlier requests wait: no
        slot is allocated. `may_drop`: see `Evictor.make`. Raises TierFailed when the system refuses memory; nothing is
        open then.
        """
        opening = OpenResult(bytearray(), [])
        statuses, puts = opening.statuses, opening.puts
        if may_open and (whole := self._open_whole(session, tenant, message, may_drop=may_drop)) is not None:
            return whole
        is_full = not may_open
        now_ns = session.reactor.now_ns()
        table = self.table
        spare = _SpareSlots(table, tenant, message.sizes)
        mine: set[bytes] = set()
        is_alone = not (table.open_puts or table.uncommitted.commits_in_flight)
        """No other writer is active."""
        try:
            for key, size, generation, parent in zip(message.keys, message.sizes, message.generations, message.parents, strict=True):
                put = None
                found = table.find(tenant, key)
                if found is not None:
                    # The writer waits for the master, which does not have the block yet.
                    is_early = found.generation == UNCOMMITTED and not is_kept(message, generation)
                    statuses.append(BUSY if is_early else PRESENT)
                elif is_full or (key in mine if is_alone else self._is_at_work(tenant, key, message, generation)):
                    statuses.append(BUSY)
                else:
                    block = table.rows.make(tenant, key, size, generation, message.namespace, parent)
                    slot = spare.take()
                    if slot is None:
                        put = table.open(block, session, now_ns=now_ns, may_drop=may_drop)
                    else:
                        put = table.open_at(block, slot, session, now_ns=now_ns)
                    is_full = put is None
                    mine.add(key)
                    statuses.append(BUSY if is_full else GRANTED)
                puts.append(put)
        except KVStoreError:
            self.abort(puts)
            raise
        finally:
            spare.free()
        if isinstance(message, Put) and message.ack == ACK_NODE_NO_WAIT:
            return opening
        return None if self._must_wait(tenant, message.keys, statuses) else opening

    def exceeded(self, tenant: str, message: OpenSlots | Put) -> QuotaExceeded | None:
        """Return the error of a put that got no slot because of the tenant's quota; None if no quota was the cause."""
        sizes = sorted(set(message.sizes), reverse=True)
        return next(filter(None, (self.table.quotas.exceeded(tenant, size_bytes) for size_bytes in sizes)), None)

    def _open_whole(self, session: Session, tenant: str, message: OpenSlots | Put, *, may_drop: bool) -> OpenResult | None:
        """Open a batch of new blocks of one size for which slots are available at once, on keys without other writers.

        Returns None if the keys have to be opened one by one; no block is open then, though some may have been evicted.
        """
        table, keys, sizes = self.table, message.keys, message.sizes
        count = len(keys)
        if count < MIN_WHOLE or max(sizes) != min(sizes) or len(set(keys)) < count or not table.are_new(tenant, keys):
            return None
        if table.uncommitted.commits_in_flight and not all(is_kept(message, generation) for generation in set(message.generations)):
            return None
        slots = table.slots.free_slots(tenant, sizes[0], count, may_drop=may_drop)
        if len(slots) < count:
            table.slots.free(slots)
            return None
        blocks = table.rows.make_all(tenant, keys, sizes[0], message.generations, message.namespace, message.parents, slots)
        statuses, now_ns = bytearray((GRANTED,)) * count, session.reactor.now_ns()
        if isinstance(message, OpenSlots) and not message.engine and not any(message.generations):
            return OpenResult(statuses, [], table.puts.add_batch(blocks, session, now_ns=now_ns))
        return OpenResult(statuses, list(table.puts.add_all(blocks, session, now_ns=now_ns)))

    def _must_wait(self, tenant: str, keys: Sequence[bytes], statuses: bytearray) -> bool:
        """Return True if a key lacks a slot and the others are only BUSY because of other writers. A PRESENT key is
        answered at once; keys without a slot wait when they are requested alone."""
        if GRANTED in statuses or PRESENT in statuses:
            return False
        table = self.table
        busy = (key for key, status in zip(keys, statuses, strict=True) if status == BUSY)
        return any(
            table.puts.of_key(tenant, key) is None
            and table.find(tenant, key) is None
            and not table.uncommitted.is_commit_in_flight(tenant, key)
            for key in busy
        )

    def _is_at_work(self, tenant: str, key: bytes, message: OpenSlots | Put, generation: int) -> bool:
        """Return True if another writer has the key open, or a commit request of a former block of the key is in
        flight. A put that the master decides must not overtake that request."""
        table = self.table
        return table.puts.of_key(tenant, key) is not None or (
            table.uncommitted.is_commit_in_flight(tenant, key) and not is_kept(message, generation)
        )

    def abort(self, puts: Sequence[OpenPut | None]) -> None:
        """Abort those that are open."""
        for put in puts:
            if put is not None:
                self.table.abort(put)


class _SpareSlots:
    """Allocates free slots for a request's blocks of one size, many at a time, without evictions."""

    def __init__(self, table: BlockTable, tenant: str, sizes: Sequence[int]) -> None:
        self._table = table
        self._tenant = tenant
        self._left = len(sizes) if len(sizes) > 1 and min(sizes) == max(sizes) else 0
        """Keys that may still need one."""
        self._size_bytes = sizes[0] if sizes else 0
        self._slots: list[Slot] = []
        """Allocated, the next one last."""
        self._is_dry = False
        """The last allocation returned none."""

    def take(self) -> Slot | None:
        """Return a slot, or None if a block must be evicted or a slab added; free slots may follow once, after the
        eviction."""
        if not self._slots and self._left > 1:
            self._slots = self._table.slots.spare_slots(self._tenant, self._size_bytes, self._left)
            self._slots.reverse()
            if self._is_dry and not self._slots:
                self._left = 0
            self._is_dry = not self._slots
        self._left -= 1
        return self._slots.pop() if self._slots else None

    def free(self) -> None:
        self._table.slots.free(self._slots)
        self._slots = []


def is_kept(message: OpenSlots | Put, generation: int) -> bool:
    """Return True if the put is acknowledged once this node holds the block (ack="node")."""
    return message.ack in NODE_ACKS if isinstance(message, Put) else generation == UNCOMMITTED


class SlotRequest(WaitingRequest):
    """OpenSlots or Put request that waits for slots; `opened` receives them."""

    __slots__ = ("caller", "drops_from_ns", "header", "is_waiting", "message", "session", "slots", "wait")

    def __init__(self, slots: SlotAllocator, session: Session, header: FrameHeader, message: OpenSlots | Put) -> None:
        """Raises Unauthorized for a connection that has not introduced itself."""
        self.caller: Caller = peer_of(session)
        super().__init__(self.caller.tenant, session, 0)
        self.slots = slots
        self.session = session
        self.header = header
        self.message = message
        self.is_waiting = False
        self.drops_from_ns = session.reactor.now_ns() + int(slots.demotion_wait_s * 1e9)
        """Time from which the request does not wait for demotions."""
        self.wait: TraceSpan | None = None
        """Span of the wait, if the request is traced."""

    def begin(self) -> None:
        """Try once, and queue the request if it must wait. Raises what `opened` raises, TierFailed, or Unavailable (too
        many wait); nothing is open then."""
        if not self._try(may_open=not self.slots.waiting.has(self.line)):
            self.is_waiting = True
            self.deadline_ns = until_ns(self.session, self.header)
            self.wait = begin_child_span(self.session, self.header, "wait_for_room")
            self.slots.waiting.add(self)
            self.session.reactor.call_at(self.drops_from_ns, self.slots.waiting.retry)

    def attempt(self) -> bool:
        return self._try(may_open=True)

    def _try(self, *, may_open: bool) -> bool:
        tenant, may_drop = self.caller.tenant, self.session.reactor.now_ns() >= self.drops_from_ns
        opening = self.slots.open(self.session, tenant, self.message, may_open=may_open, may_drop=may_drop)
        if opening is None and may_open and self.slots.table.ahead.take_back():
            opening = self.slots.open(self.session, tenant, self.message, may_open=True, may_drop=may_drop)
        if opening is None:
            return False
        if self.wait is not None:
            self.wait.end()
        try:
            self.opened(opening)
        except BaseException:
            self.slots.abort(opening.puts if opening.batch is None else self.slots.table.puts.puts_of(opening.batch))
            raise
        return True

    @abstractmethod
    def opened(self, opening: OpenResult) -> None:
        """Handle the open puts. If it raises, they are aborted."""

    def give_up(self) -> None:
        quota = self.slots.exceeded(self.caller.tenant, self.message)
        self.fail(quota or Full("no slot became free before the deadline: try again later, or give the node more capacity"))
