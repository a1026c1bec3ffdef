"""Slots for the keys of one request: what can be opened now, and who has to wait.

A request that does not fit whole is granted in part, and the rest answered BUSY ("ask again"): it never holds slots while waiting for
more, so two large batches cannot block one another. One of which nothing is granted, and nothing there already, waits for room behind its
own tenant's until its deadline, then fails as Full, or as QuotaExceeded. It waits for copies to NVMe no longer than `demotion_wait_s`: then
the coldest blocks leave the node for it, written or not.
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
from kvstore.store.block_table.uncommitted import UNDECIDED
from kvstore.store.session_authenticator import Caller, peer_of
from kvstore.store.wait_queue import WaitingRequest, WaitQueue, begin_part, until_ns
from kvstore.tiers.tier import Slot

MIN_WHOLE = 16
"""Keys of a batch that is opened as a whole where it can be: fewer are as quick one by one."""
MAX_NAMESPACE_BYTES = 255
"""What a column of texts in a Publish holds."""


class OpenResult(NamedTuple):
    """What a request got: for each key GRANTED, PRESENT or BUSY, and the open put of a granted one; or a batch that was granted whole."""

    statuses: bytearray
    puts: list[OpenPut | None]
    batch: OpenBatch | None = None


class SlotAllocator:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(self, table: BlockTable, waiting: WaitQueue, *, demotion_wait_s: float) -> None:
        """`demotion_wait_s` is how long a request waits at most before blocks may leave the node for it that no lower tier holds."""
        self.table = table
        self.waiting = waiting
        self.demotion_wait_s = demotion_wait_s

    def check(self, message: OpenSlots | Put, tenant: str) -> None:
        """Raises InvalidArgument for what could never be stored, here or by the master; QuotaExceeded for what the tenant never may."""
        sizes = message.sizes
        if sizes and not (1 <= min(sizes) and max(sizes) <= MAX_VALUE_BYTES):
            raise InvalidArgument(f"a value is 1 to {MAX_VALUE_BYTES} bytes long; got sizes from {min(sizes)} to {max(sizes)}")
        if len(message.namespace) > MAX_NAMESPACE_BYTES or len(message.namespace.encode()) > MAX_NAMESPACE_BYTES:
            raise InvalidArgument(f"a namespace is at most {MAX_NAMESPACE_BYTES} bytes long")
        if isinstance(message, Put) and message.ack in NODE_ACKS and any(message.generations):
            raise InvalidArgument("what the master has reserved is answered once it has it: say ack 0")
        if sizes:
            self.table.check_room(max(sizes), tenant)

    def open(self, session: Session, tenant: str, message: OpenSlots | Put, *, may_open: bool, may_drop: bool) -> OpenResult | None:
        """Open what can be opened now. After the first key without room no further one is tried: order is the writer's priority.

        None: the request has to wait, and nothing is open. Without `may_open` no room is taken: others wait for it already. `may_drop`: see
        `Room.make`. Raises TierFailed when the system refuses memory; nothing is open then.
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
        is_alone = not (table.open_puts or table.undecided.claims)
        """Nobody else is at any key."""
        try:
            for key, size, generation, parent in zip(message.keys, message.sizes, message.generations, message.parents, strict=True):
                put = None
                found = table.find(tenant, key)
                if found is not None:
                    # Its writer is to be told once all can read it, and that is not yet so.
                    is_early = found.generation == UNDECIDED and not is_kept(message, generation)
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
            spare.give_back()
        if isinstance(message, Put) and message.ack == ACK_NODE_NO_WAIT:
            return opening
        return None if self._must_wait(tenant, message.keys, statuses) else opening

    def exceeded(self, tenant: str, message: OpenSlots | Put) -> QuotaExceeded | None:
        """What a put fails with that was given no room, where it is for the tenant's quota."""
        sizes = sorted(set(message.sizes), reverse=True)
        return next(filter(None, (self.table.quotas.exceeded(tenant, size_bytes) for size_bytes in sizes)), None)

    def _open_whole(self, session: Session, tenant: str, message: OpenSlots | Put, *, may_drop: bool) -> OpenResult | None:
        """A batch of many new blocks of one size, at keys that nobody is at, for which there is room at once. None: key by key, with no
        block opened; those that would leave for them may have left."""
        table, keys, sizes = self.table, message.keys, message.sizes
        count = len(keys)
        if count < MIN_WHOLE or max(sizes) != min(sizes) or len(set(keys)) < count or not table.are_new(tenant, keys):
            return None
        if table.undecided.claims and not all(is_kept(message, generation) for generation in set(message.generations)):
            return None
        slots = table.slots.free_slots(tenant, sizes[0], count, may_drop=may_drop)
        if len(slots) < count:
            table.slots.give_back(slots)
            return None
        blocks = table.rows.make_all(tenant, keys, sizes[0], message.generations, message.namespace, message.parents, slots)
        statuses, now_ns = bytearray((GRANTED,)) * count, session.reactor.now_ns()
        if isinstance(message, OpenSlots) and not message.engine and not any(message.generations):
            return OpenResult(statuses, [], table.puts.add_batch(blocks, session, now_ns=now_ns))
        return OpenResult(statuses, list(table.puts.add_all(blocks, session, now_ns=now_ns)))

    def _must_wait(self, tenant: str, keys: Sequence[bytes], statuses: bytearray) -> bool:
        """A key lacks room, and there is nothing to say of the others, but of those that another is writing or has written. One that is
        there is a success at once; those that lack room then wait when they are asked for alone."""
        if GRANTED in statuses or PRESENT in statuses:
            return False
        table = self.table
        busy = (key for key, status in zip(keys, statuses, strict=True) if status == BUSY)
        return any(
            table.puts.of_key(tenant, key) is None and table.find(tenant, key) is None and not table.undecided.is_claimed(tenant, key)
            for key in busy
        )

    def _is_at_work(self, tenant: str, key: bytes, message: OpenSlots | Put, generation: int) -> bool:
        """Another writer is at the key; or the master is just deciding about a block of it that has left, which a put that it is asked
        about, too, must not overtake."""
        table = self.table
        return table.puts.of_key(tenant, key) is not None or (table.undecided.is_claimed(tenant, key) and not is_kept(message, generation))

    def abort(self, puts: Sequence[OpenPut | None]) -> None:
        """Whatever of these is open is so no more."""
        for put in puts:
            if put is not None:
                self.table.abort(put)


class _SpareSlots:
    """Slots for a request's new blocks, all of one size, that nobody has to leave for: many at a time."""

    def __init__(self, table: BlockTable, tenant: str, sizes: Sequence[int]) -> None:
        self._table = table
        self._tenant = tenant
        self._left = len(sizes) if len(sizes) > 1 and min(sizes) == max(sizes) else 0
        """Keys that may still want one."""
        self._size_bytes = sizes[0] if sizes else 0
        self._slots: list[Slot] = []
        """The next one is the last."""
        self._is_dry = False
        """There was none the last time."""

    def take(self) -> Slot | None:
        """None: room has to be made, or a slab, after which there may be some again; but not once room had to be made."""
        if not self._slots and self._left > 1:
            self._slots = self._table.slots.spare_slots(self._tenant, self._size_bytes, self._left)
            self._slots.reverse()
            if self._is_dry and not self._slots:
                self._left = 0
            self._is_dry = not self._slots
        self._left -= 1
        return self._slots.pop() if self._slots else None

    def give_back(self) -> None:
        self._table.slots.give_back(self._slots)
        self._slots = []


def is_kept(message: OpenSlots | Put, generation: int) -> bool:
    """Whether a put is answered once this node holds the block, whatever the master knows."""
    return message.ack in NODE_ACKS if isinstance(message, Put) else generation == UNDECIDED


class SlotRequest(WaitingRequest):
    """An Open or a Put that wants slots: it gets them at once or in its turn, and is told so by `opened`."""

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
        """From then on copies to NVMe are not waited for."""
        self.wait: TraceSpan | None = None
        """For room, where the request is traced."""

    def begin(self) -> None:
        """Once. Raises what `opened` raises, or TierFailed, or Unavailable (too many wait): nothing is open then."""
        if not self._try(may_open=not self.slots.waiting.has(self.line)):
            self.is_waiting = True
            self.deadline_ns = until_ns(self.session, self.header)
            self.wait = begin_part(self.session, self.header, "wait_for_room")
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
        """These are open now. Whatever it raises ends them."""

    def give_up(self) -> None:
        quota = self.slots.exceeded(self.caller.tenant, self.message)
        self.fail(quota or Full("no room was freed before the deadline; try again later, or give the node more capacity"))
