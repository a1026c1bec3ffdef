"""Puts at a node: Open, Commit and Abort for writers that share memory or write by the transfer engine, Put for values that come
through the socket.

A request that does not fit whole is granted in part, and the rest answered BUSY ("ask again"): it never holds slots while waiting for
more, so two large batches cannot block one another. One of which nothing is granted, and nothing there already, waits for room behind its
own tenant's until its deadline, then fails as Full.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence

import xxhash

from kvstore.protocol.errors import ChecksumMismatch, Full, InvalidArgument, KVStoreError, ProtocolError, TierFailed
from kvstore.protocol.frames import MAX_VALUE_BYTES, Header
from kvstore.protocol.message import BUSY, GRANTED, PRESENT
from kvstore.protocol.node_messages import ALREADY_THERE, ASK_AGAIN, STORED, Abort, Commit, Open, Opened, Put
from kvstore.protocol.session_messages import Flags, Ok
from kvstore.rpc.session import Session
from kvstore.store.blocks.block import Block
from kvstore.store.blocks.open_puts import Grant, OpenPut
from kvstore.store.blocks.table import BlockTable
from kvstore.store.caller import MAX_SLABS, Caller, PutFrame, peer_of, writer_of
from kvstore.store.publisher import Publisher
from kvstore.store.puts.answering import Answers, until_ns
from kvstore.store.puts.claims import Claims
from kvstore.store.puts.waiting import Waiting, WaitingRoom
from kvstore.store.regions import SharedRegions
from kvstore.tiers.dram import DramTier

DISCARD_BYTES = 1 << 20
MAX_NAMESPACE_BYTES = 255
"""What a column of texts in a Publish holds."""


class PutService:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(
        self,
        table: BlockTable,
        dram: DramTier,
        publisher: Publisher,
        waiting: WaitingRoom,
        answers: Answers,
        claims: Claims,
        regions: SharedRegions | None,
    ) -> None:
        self._table = table
        self._dram = dram
        self._publisher = publisher
        self._waiting = waiting
        self._answers = answers
        self._claims = claims
        self._regions = regions
        self._discard = memoryview(bytearray(DISCARD_BYTES))
        self.in_bytes = 0

    # --- through shared memory ---

    def open(self, session: Session, header: Header, message: Open) -> None:
        """Answer with slots for as many keys as there is room for, or wait."""
        peer = writer_of(session)
        if message.engine and self._regions is None:
            raise InvalidArgument("this node has no transfer engine: use Put")
        if not message.engine and not session.is_local:
            raise InvalidArgument("Open needs shared memory or the transfer engine: connect to the node's Unix socket, or use Put")
        self._check(message)

        def attempt(may_open: bool) -> bool:
            statuses, puts = self._open_all(session, peer, message, may_open)
            if self._must_wait(peer, message.keys, statuses):
                return False
            session.reply(header.request_id, self._shown(statuses, puts) if message.engine else self._opened(peer, statuses, puts))
            return True

        self._attempt_or_wait(session, header, peer, attempt, lambda error: session.fail(header.request_id, error))

    def _open_all(self, session: Session, peer: Caller, message: Open | Put, may_open: bool) -> tuple[bytearray, list[OpenPut | None]]:
        """Open what can be opened now. After the first key without room no further one is tried: order is the writer's priority.

        Raises TierFailed when the system refuses memory; nothing is open then.
        """
        statuses = bytearray()
        puts: list[OpenPut | None] = []
        is_full = not may_open
        now_ns = session.reactor.now_ns()
        table, tenant = self._table, peer.tenant
        for key, size, generation, parent in zip(message.keys, message.sizes, message.generations, message.parents, strict=True):
            put = None
            if table.find(tenant, key) is not None:
                statuses.append(PRESENT)
            elif is_full or table.writer(tenant, key) is not None:
                statuses.append(BUSY)
            else:
                block = Block(tenant, key, size, generation, message.namespace, parent)
                try:
                    put = table.open(block, session, now_ns=now_ns)
                except KVStoreError:
                    self._abort_all(puts)
                    raise
                is_full = put is None
                statuses.append(BUSY if is_full else GRANTED)
            puts.append(put)
        return statuses, puts

    def _must_wait(self, peer: Caller, keys: Sequence[bytes], statuses: bytearray) -> bool:
        """A key lacks room, and there is nothing to say of the others, but of those that another is writing. One that is there is a
        success at once; those that lack room then wait when they are asked for alone."""
        if GRANTED in statuses or PRESENT in statuses:
            return False
        writer, tenant = self._table.writer, peer.tenant
        return any(status == BUSY and writer(tenant, key) is None for key, status in zip(keys, statuses, strict=True))

    def _opened(self, peer: Caller, statuses: bytearray, puts: list[OpenPut | None]) -> Opened:
        ids, slabs, offsets = [0] * len(puts), [0] * len(puts), [0] * len(puts)
        group_of_slab: dict[int, int] = {}
        for index, put in enumerate(puts):
            if put is not None:
                put.is_named = True
                ids[index] = put.put_id
                slabs[index], offsets[index] = self._dram.locate(put.slot)
                group_of_slab[slabs[index]] = put.slot.group
        return Opened(bytes(statuses), ids, slabs, offsets, [b""] * len(puts), self._slabs_ahead(peer, group_of_slab))

    def _shown(self, statuses: bytearray, puts: list[OpenPut | None]) -> Opened:
        """The answer to a writer of another host: each slot is a region of its own, which the put's end closes.

        Raises whatever the engine has against it; nothing is open then."""
        assert self._regions is not None
        nowhere = [0] * len(puts)
        regions = [b""] * len(puts)
        try:
            for index, put in enumerate(puts):
                if put is not None:
                    put.is_named = True
                    put.grant, regions[index] = self._regions.show_slot(put.slot)
        except KVStoreError:
            self._abort_all(puts)
            raise
        return Opened(bytes(statuses), [put.put_id if put is not None else 0 for put in puts], nowhere, nowhere, regions, [])

    def _slabs_ahead(self, peer: Caller, group_of_slab: dict[int, int]) -> list[int]:
        """Slabs to be mapped meanwhile: for each group as many as the writer came to now and was not told of before, and one more."""
        fresh = group_of_slab.keys() - peer.exported
        peer.exported |= fresh
        ahead: list[int] = []
        for group, count in Counter(group_of_slab[slab] for slab in fresh).items():
            with contextlib.suppress(TierFailed):  # no memory for slabs that nobody needs yet
                ahead += self._dram.reserve_slabs(group, count + 1)
        return ahead[:MAX_SLABS]

    def commit(self, session: Session, header: Header, message: Commit) -> None:
        """Make written puts visible, and answer when the master has made them durable."""
        peer = peer_of(session)
        flags = bytearray()
        stored: list[Block] = []
        for put_id, checksum in zip(message.put_ids, message.checksums, strict=True):
            put = self._table.put(put_id, session)
            if put is None:
                self._table.settle(put_id, session)
                flags.append(ASK_AGAIN)
            elif put.grant is not None and not self._is_whole(put, put.grant, checksum):
                self._table.abort(put)
                flags.append(ASK_AGAIN)
            else:
                stored.append(self._table.commit(put, checksum))
                self.in_bytes += put.block.size_bytes
                flags.append(STORED)
        self._table.events.stored(peer.tenant, stored)
        self._answer_when_published(session, header, stored[-1].event_seq if stored else 0, flags)

    def _is_whole(self, put: OpenPut, grant: Grant, checksum: int) -> bool:
        """A value that came by the transfer engine: nobody writes it any more, and it is what the writer said."""
        return grant.revoke() and xxhash.xxh3_64_intdigest(self._dram.view(put.slot)) == checksum

    def abort(self, session: Session, header: Header, message: Abort) -> None:
        """Forget these puts; what they held can be used again."""
        peer_of(session)
        for put_id in message.put_ids:
            put = self._table.put(put_id, session)
            if put is not None:
                self._table.abort(put)
            else:
                self._table.settle(put_id, session)
        session.reply(header.request_id, Ok())
        self._waiting.retry()

    # --- through the socket ---

    def payload(self, session: Session, header: Header, message: Put) -> list[memoryview] | None:
        """Where the values go: straight into their slots; those not wanted into a buffer nobody reads."""
        peer = writer_of(session)
        self._check(message)
        if sum(message.sizes) != header.payload_bytes:
            raise ProtocolError(f"a payload of {header.payload_bytes} bytes for values of {sum(message.sizes)} bytes")
        views: list[memoryview] | None = None
        is_waiting = False

        def attempt(may_open: bool) -> bool:
            nonlocal views
            statuses, puts = self._open_all(session, peer, message, may_open)
            if self._must_wait(peer, message.keys, statuses):
                return False
            views = self._destinations(peer, message, statuses, puts)
            if is_waiting:
                session.accept_payload(views)
            return True

        self._attempt_or_wait(session, header, peer, attempt, session.refuse_payload)
        is_waiting = True
        return views

    def _destinations(self, peer: Caller, message: Put, statuses: bytearray, puts: list[OpenPut | None]) -> list[memoryview]:
        wait_seq = 0
        if PRESENT in statuses:
            present = (self._table.find(peer.tenant, key) for key in message.keys)
            wait_seq = max(block.event_seq for block in present if block is not None)
        values = [self._dram.view(put.slot) if put is not None else None for put in puts]
        is_claim = not any(message.generations)
        peer.frame = PutFrame(is_claim, statuses, puts, values, message.checksums, wait_seq)
        views: list[memoryview] = []
        for value, size in zip(values, message.sizes, strict=True):
            if value is not None:
                views.append(value)
            else:
                views += [self._discard[: min(DISCARD_BYTES, size - start)] for start in range(0, size, DISCARD_BYTES)]
        return views

    def arrived(self, session: Session, header: Header) -> None:
        """The payload is whole: verify, make visible, answer when published."""
        frame = peer_of(session).frame
        if frame is None:
            raise ProtocolError("a Put without values")
        peer_of(session).frame = None
        self._verify(frame)
        if frame.is_claim and GRANTED in frame.statuses:
            self._claims.claim(session, header, frame)
            return
        flags = bytearray()
        stored: list[Block] = []
        for status, put, checksum in zip(frame.statuses, frame.puts, frame.checksums, strict=True):
            if put is not None and self._table.is_open(put):
                stored.append(self._table.commit(put, checksum))
                frame.wait_seq = put.block.event_seq
                self.in_bytes += put.block.size_bytes
                flags.append(STORED)
                continue
            if put is not None:
                self._table.abort(put)
            flags.append(ALREADY_THERE if status == PRESENT else ASK_AGAIN)
        self._table.events.stored(peer_of(session).tenant, stored)
        self._answer_when_published(session, header, frame.wait_seq, flags)

    def _verify(self, frame: PutFrame) -> None:
        """What crossed a socket is checked before anyone can read it. A bad value fails the request; none of it becomes visible."""
        for put, value, checksum in zip(frame.puts, frame.values, frame.checksums, strict=True):
            if put is not None and value is not None and xxhash.xxh3_64_intdigest(value) != checksum:
                self._abort_all(frame.puts)
                raise ChecksumMismatch(f"the value of key {put.block.key.hex()} arrived damaged: send it again")

    # --- both ---

    def _check(self, message: Open | Put) -> None:
        """Raises InvalidArgument for what could never be stored, here or by the master."""
        sizes = message.sizes
        if sizes and not (1 <= min(sizes) and max(sizes) <= MAX_VALUE_BYTES):
            raise InvalidArgument(f"a value is 1 to {MAX_VALUE_BYTES} bytes long; got sizes from {min(sizes)} to {max(sizes)}")
        if len(message.namespace) > MAX_NAMESPACE_BYTES or len(message.namespace.encode()) > MAX_NAMESPACE_BYTES:
            raise InvalidArgument(f"a namespace is at most {MAX_NAMESPACE_BYTES} bytes long")
        self._table.check_room(max(sizes, default=0))

    def _abort_all(self, puts: Sequence[OpenPut | None]) -> None:
        for put in puts:
            if put is not None:
                self._table.abort(put)

    def _attempt_or_wait(
        self, session: Session, header: Header, peer: Caller, attempt: Callable[[bool], bool], fail: Callable[[KVStoreError], None]
    ) -> None:
        """`attempt` is told whether it may take room: not while others of the tenant wait for it."""
        if attempt(not self._waiting.has(peer.tenant)):
            return

        def attempt_later() -> bool:
            try:
                return attempt(True)
            except KVStoreError as error:
                fail(error)
                return True

        def give_up() -> None:
            fail(Full("no room was freed before the deadline; try again later, or give the node more capacity"))

        self._waiting.add(Waiting(peer.tenant, session, until_ns(session, header), attempt_later, give_up))

    def _answer_when_published(self, session: Session, header: Header, seq: int, flags: bytearray) -> None:
        if seq:
            self._publisher.when_published(seq, self._answers.once(session, header, flags))
        else:
            session.reply(header.request_id, Flags(bytes(flags)))
