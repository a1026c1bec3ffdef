"""Message handler of a node: checks permissions, dispatches frames, and releases what a closed connection held."""

from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.protocol.catalog_messages import (
    DRAIN_OFF,
    CopyBlocks,
    DeleteBlocks,
    MarkSecondary,
    PrefetchBlocks,
    RequestCopy,
    RevokeCredentials,
    SetDraining,
    SetPinned,
    TicketKey,
)
from kvstore.protocol.errors import Denied, InvalidArgument, KVStoreError, ProtocolError, StaleEpoch, StaleHandle, Unauthorized, Unavailable
from kvstore.protocol.event_messages import FetchEvents
from kvstore.protocol.frames import MAX_BATCH, FrameHeader, kind_of
from kvstore.protocol.message import Message
from kvstore.protocol.messages import MESSAGES
from kvstore.protocol.node_messages import (
    HOLD_GRANTED,
    HOLD_MISS,
    HOLD_REFUSED,
    MAX_PREFETCH_KEYS,
    RETAIN_PUT,
    RETAIN_READ,
    RETAIN_SET,
    SEVERAL_SESSIONS,
    TO_DRAM,
    TO_LOCAL,
    AbortPuts,
    CommitPuts,
    ExportSlabs,
    ExportSlabsReply,
    HoldBlocks,
    MapSlabs,
    MapSlabsReply,
    OpenIndex,
    OpenSlotAhead,
    OpenSlots,
    Prefetch,
    Put,
    PutFromSlot,
    ReadBlocks,
    ReleaseHolds,
    ReleaseLeases,
    ReleaseSession,
    Retain,
    WaitCommitted,
)
from kvstore.protocol.retention import DEFAULT_PRIORITY, MAX_RETENTION_S, PRIORITIES
from kvstore.protocol.session_messages import ROLE_NODE, SERVER_NODE, Count, Flags, Hello, Ok, Welcome
from kvstore.rpc.server.lingering_peer import LingeringPeer
from kvstore.rpc.server.session import Session
from kvstore.rpc.server.tenant_loads import TenantLoads
from kvstore.security.identity import MASTER, UNAUTHENTICATED
from kvstore.security.permissions import NODE_FRAMES, WRITES, allowed_frames, check, check_complete, denial
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.retention import Hint
from kvstore.store.identity import NodeIdentity
from kvstore.store.master_requests import request_master
from kvstore.store.session_authenticator import MAX_SLABS, Caller, SessionAuthenticator, peer_of
from kvstore.store.shared_index.index_writer import STEPS_PER_RING
from kvstore.store.shared_memory import close_all
from kvstore.store.storage import Storage
from kvstore.store.writes.commit_batcher import CommitBatcher

MAX_TENANT_BYTES = 128
"""Limit of the master. Events with a longer name would be refused forever."""
_UNAUTHENTICATED_FRAMES = allowed_frames(NODE_FRAMES, UNAUTHENTICATED)
_MASTER_FRAMES = allowed_frames(NODE_FRAMES, MASTER)


class NodeService:
    """Handler of all frames, from clients, other nodes and masters. Not thread-safe: called from the node's loop."""

    def __init__(self, storage: Storage, authenticator: SessionAuthenticator, identity: NodeIdentity) -> None:
        """`identity` is what the node reports in its Welcome."""
        self._table = storage.table
        self._dram = storage.dram
        self._mover = storage.mover
        self._leases = storage.leases
        self._waiting = storage.waiting
        self._in_place_puts = storage.in_place_puts
        self._socket_puts = storage.socket_puts
        self._reads = storage.reads
        self._regions = storage.regions
        self._prefetcher = storage.prefetcher
        self._expected_prefetches = storage.expected_prefetches
        self._replica_queue = storage.replica_queue
        self._shared_index = storage.shared_index
        self._commit_waits = storage.commit_waits
        self._drainer = storage.drainer
        self._partition_map = storage.partition_map
        self._authenticator = authenticator
        self._identity = identity
        self.loads = TenantLoads()
        """Connections and requests of clients, by tenant."""
        self._lingering: set[LingeringPeer] = set()
        """Local writers whose connection this side closed, and that may still write."""
        self._pinned: set[tuple[str, bytes]] = set()
        """Tenant and key of the blocks that masters pinned here."""
        self._unconfirmed_pins: dict[int, set[tuple[str, bytes]]] = {}
        """By partition: pins that the master of the present link has not confirmed."""
        self.links: dict[int, Session] = {}
        """Connections to masters, by partition: the only ones that may send commands."""
        self._epochs: dict[int, int] = {}
        """Epochs of their registrations."""
        self._handlers = self._handlers_by_type(storage.commit_batcher)
        check_complete(NODE_FRAMES, [Put.TYPE, *self._handlers])

    def _handlers_by_type(self, commit_batcher: CommitBatcher) -> dict[int, Callable[[Session, FrameHeader, Any], None]]:
        """Handlers of all frames except Put, which has a payload."""
        return {
            Hello.TYPE: self._hello,
            OpenSlots.TYPE: self._open,
            CommitPuts.TYPE: self._in_place_puts.commit,
            AbortPuts.TYPE: self._in_place_puts.abort,
            OpenSlotAhead.TYPE: self._open_ahead,
            PutFromSlot.TYPE: self._put_from_slot,
            ReadBlocks.TYPE: self._reads.read,
            ReleaseLeases.TYPE: self._release,
            MapSlabs.TYPE: self._map_slabs,
            OpenIndex.TYPE: self._open_index,
            ExportSlabs.TYPE: self._export_slabs,
            DeleteBlocks.TYPE: self._delete_blocks,
            SetPinned.TYPE: self._pin,
            CopyBlocks.TYPE: self._copy,
            SetDraining.TYPE: self._drain,
            FetchEvents.TYPE: self._events,
            WaitCommitted.TYPE: commit_batcher.await_all,
            HoldBlocks.TYPE: self._hold_blocks,
            ReleaseHolds.TYPE: self._release_holds,
            Prefetch.TYPE: self._prefetch,
            Retain.TYPE: self._retain,
            ReleaseSession.TYPE: self._release_session,
            TicketKey.TYPE: self._ticket_key,
            RevokeCredentials.TYPE: self._revoke,
            PrefetchBlocks.TYPE: self._prefetch_for_engine,
            MarkSecondary.TYPE: self._mark_secondary,
        }

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        if header.type == Put.TYPE:
            self._socket_puts.arrived(session, header)  # its message was read when its payload began
            return
        handler = self._handlers.get(header.type)
        if handler is None:
            raise ProtocolError(f"message type {header.type} is not one that a node handles")
        kind = MESSAGES[header.type]
        if header.type not in self._allowed(session):
            self._refuse(session, kind)
        handler(session, header, kind.unpack(body))

    def _allowed(self, session: Session) -> frozenset[int]:
        """Return the frame types that the session may send."""
        caller = session.context
        if caller is not None:
            found: frozenset[int] = caller.allowed
            return found
        return _MASTER_FRAMES if session in self.links.values() else _UNAUTHENTICATED_FRAMES

    def _refuse(self, session: Session, kind: type[Message]) -> None:
        identity = session.context.identity if isinstance(session.context, Caller) else UNAUTHENTICATED
        raise denial(NODE_FRAMES[kind.TYPE], identity, kind.__name__)

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> list[memoryview] | None:
        if header.type != Put.TYPE:
            raise ProtocolError(f"a message of type {header.type} has no payload")
        if header.type not in self._allowed(session):
            self._refuse(session, Put)
        self._drainer.check_open()
        self._take_accesses(session)
        if self._socket_puts.inline.payload(session, header, body):
            return None
        return self._socket_puts.payload(session, header, Put.unpack(body))

    def _put_inline(self, tenant: str, session: Session, frame: memoryview) -> bool:
        """`Session.at_once` hook: serve a small put, or a put into a slot ahead, from the receive buffer. Return True
        if it was served."""
        kind = kind_of(frame)
        if kind not in (Put.TYPE, PutFromSlot.TYPE) or self._drainer.is_closed:
            return False
        self._shared_index.take_accesses(self._table.record_local_reads, tenant)
        serve = self._socket_puts.inline.frame if kind == Put.TYPE else self._in_place_puts.ahead.frame
        return serve(session, tenant, frame)

    def _open(self, session: Session, header: FrameHeader, message: OpenSlots) -> None:
        self._drainer.check_open()
        self._take_accesses(session)
        self._in_place_puts.open(session, header, message)

    def _open_ahead(self, session: Session, header: FrameHeader, message: OpenSlotAhead) -> None:
        self._drainer.check_open()
        self._take_accesses(session)
        self._in_place_puts.ahead.open(session, header, message)

    def _put_from_slot(self, session: Session, header: FrameHeader, message: PutFromSlot) -> None:
        self._drainer.check_open()
        self._take_accesses(session)
        self._in_place_puts.ahead.put(session, header, message)

    def _take_accesses(self, session: Session) -> None:
        """Apply the accesses of the tenant's local clients before a put evicts blocks."""
        if isinstance(session.context, Caller):
            self._shared_index.take_accesses(self._table.record_local_reads, session.context.tenant)

    def closed(self, session: Session) -> None:
        """Release all that a closed connection held: leases, holds, open puts, queued requests, pending answers."""
        cleanups: list[Callable[[Session], None]] = [
            lambda owner: self._shared_index.take_last_accesses(self._table.record_local_reads, owner),
            self._waiting.forget_owner,
            self._commit_waits.forget_owner,
            self._reads.forget_owner,
            self._leases.forget_owner,
            self._table.holds.forget_owner,
            self._forget_writer,
            self._table.events.forget_asker,
            self._shared_index.forget_owner,
            self._authenticator.forget,
            self.loads.leave,
        ]
        for forget in cleanups:  # an exception in one does not stop the others
            session.reactor.guarded(forget, session)
        self._waiting.retry()

    def _forget_writer(self, session: Session) -> None:
        """Free the slots of the connection's puts once they cannot be written any more.

        A local writer has them mapped and may be stopped in the middle of a copy. If this side closed the connection,
        its slots are kept until it closes its end.
        """
        if not (session.is_local and self._table.may_write(session)):
            self._table.forget_owner(session)
            return

        def gone(peer: LingeringPeer) -> None:
            self._lingering.discard(peer)
            self._table.forget_owner(session)
            self._waiting.retry()

        peer = LingeringPeer(session.reactor, session.detach_socket(), gone)
        if peer.is_awaited:
            self._lingering.add(peer)

    def close(self) -> None:
        """Stop waiting for lingering peers, because their memory is about to be unmapped. A second close is a no-op."""
        while self._lingering:
            self._lingering.pop().close()

    def _hello(self, session: Session, header: FrameHeader, message: Hello) -> None:
        if len(message.tenant) > MAX_TENANT_BYTES or len(message.tenant.encode()) > MAX_TENANT_BYTES:
            raise InvalidArgument(f"tenant name is too long: at most {MAX_TENANT_BYTES} bytes")
        _check_same(session, message)
        caller = self._authenticator.admit(session, message)
        if not caller.is_node:
            try:
                session.set_tenant_load(self.loads.enter(session, caller.tenant))
            except KVStoreError:
                self._authenticator.forget(session)
                raise
        session.context = caller
        session.fast_path = partial(self._put_inline, caller.tenant) if Put.TYPE in caller.allowed else None
        own = self._identity
        welcome = Welcome(SERVER_NODE, own.name, self._authenticator.node_id, own.instance, own.host_id, own.unix)
        session.welcome(header.request_id, welcome)

    def _release(self, session: Session, header: FrameHeader, message: ReleaseLeases) -> None:
        self._reads.release(session, message)
        self._waiting.retry()

    def _hold_blocks(self, session: Session, header: FrameHeader, message: HoldBlocks) -> None:
        """A hold is not an access, unlike a read: lookups alone do not keep blocks in memory."""
        tenant, now_ns = peer_of(session).tenant, session.reactor.now_ns()
        found = [self._table.find(tenant, key) for key in message.keys]
        is_here = [
            block is not None and generation in (0, block.generation) for block, generation in zip(found, message.generations, strict=True)
        ]
        blocks = [block for block, is_there in zip(found, is_here, strict=True) if block is not None and is_there]
        until_ns = now_ns + message.ttl_ms * 1_000_000
        held = iter(self._table.holds.add(session, tenant, message.number, blocks, until_ns=until_ns, now_ns=now_ns))
        flags = [(HOLD_GRANTED if next(held) else HOLD_REFUSED) if is_there else HOLD_MISS for is_there in is_here]
        session.reply(header.request_id, Flags(bytes(flags)))

    def _release_holds(self, session: Session, header: FrameHeader, message: ReleaseHolds) -> None:
        for number in message.numbers:
            self._table.holds.release(peer_of(session).tenant, number)
        self._waiting.retry()

    def _prefetch(self, session: Session, header: FrameHeader, message: Prefetch) -> None:
        """Queue promotions, and request copies of the blocks that are not here. Answered at once."""
        if message.to not in (TO_LOCAL, TO_DRAM):
            raise InvalidArgument(f"the target of a prefetch is {TO_LOCAL} (this node) or {TO_DRAM} (its DRAM), not {message.to}")
        if len(message.keys) > MAX_PREFETCH_KEYS:
            raise InvalidArgument(f"at most {MAX_PREFETCH_KEYS} keys per Prefetch; got {len(message.keys)}")
        tenant, keys = peer_of(session).tenant, list(dict.fromkeys(message.keys))
        if self._drainer.is_closed:
            self._table.prefetched.refused += len(keys)
            session.reply(header.request_id, Count(0))
            return
        queued = self._prefetcher.queue(tenant, keys) if message.to == TO_DRAM else 0
        missing = [key for key in keys if self._table.are_new(tenant, [key])]
        for partition, part in self._by_partition(missing).items():
            queued += self._request_prefetch(tenant, partition, part, session.reactor.now_ns())
        session.reply(header.request_id, Count(queued))

    def _request_prefetch(self, tenant: str, partition: int, keys: list[bytes], now_ns: int) -> int:
        """Request copies of these blocks from the partition's master, whichever nodes hold them. Return the number of
        requested blocks: 0 without a master."""
        link, prefetched = self.links.get(partition), self._table.prefetched
        if link is None:
            return 0
        wanted = prefetched.await_copies(tenant, keys, now_ns)
        if not wanted:
            return 0

        def answered(reply: Flags | KVStoreError) -> None:
            flags = reply.flags if isinstance(reply, Flags) and len(reply.flags) == len(wanted) else bytes(len(wanted))
            prefetched.forget_copies(tenant, [key for key, flag in zip(wanted, flags, strict=True) if not flag])

        request_master(link, RequestCopy(self._epochs[partition], tenant, 0, wanted), Flags, answered)
        return len(wanted)

    def _retain(self, session: Session, header: FrameHeader, message: Retain) -> None:
        """Apply a hint. One that follows a read needs a read permission, with which it lowers no priority."""
        caller, now_ns = peer_of(session), session.reactor.now_ns()
        _check_retain(message)
        if message.cause != RETAIN_READ:
            check(WRITES, caller.identity, "Retain")
        found = [self._table.find(caller.tenant, key) for key in message.keys]
        blocks = [block for block in found if block is not None]
        lowers = message.priority < DEFAULT_PRIORITY and not WRITES.allows(caller.identity)
        hint = Hint(None if lowers else message.priority, message.ttl_ms, message.session, message.cause != RETAIN_READ)
        self._table.retention.ignored += lowers * len(blocks)
        self._table.retain(caller.tenant, blocks, hint, message.reuse_ms, now_ns)
        if message.reuse_ms and blocks:
            self._expected_prefetches.expect(caller.tenant, [block.key for block in blocks], message.reuse_ms * 1_000_000, now_ns)
        session.reply(header.request_id, Flags(bytes(block is not None for block in found)))

    def _release_session(self, session: Session, header: FrameHeader, message: ReleaseSession) -> None:
        session.reply(header.request_id, Count(self._table.retention.end_session(peer_of(session).tenant, message.session)))

    def _by_partition(self, keys: list[bytes]) -> dict[int, list[bytes]]:
        found: dict[int, list[bytes]] = {}
        for key in keys:
            found.setdefault(self._partition_map.of(key), []).append(key)
        return found

    def _map_slabs(self, session: Session, header: FrameHeader, message: MapSlabs) -> None:
        peer = peer_of(session)
        if message.writable:
            check(WRITES, peer.identity, "MapSlabs for writing")
        if not session.is_local or len(message.slabs) > MAX_SLABS:
            raise InvalidArgument(f"MapSlabs needs a Unix socket and at most {MAX_SLABS} slabs; got {len(message.slabs)}")
        if len(message.mapped) > MAX_BATCH:
            raise InvalidArgument(f"at most {MAX_BATCH} held slabs per MapSlabs; got {len(message.mapped)}")
        peer.forget_freed(self._dram.has_slab)
        fds: list[int] = []
        try:
            sizes = [self._export(peer, slab, bool(message.writable), fds) for slab in message.slabs]
        except OSError as error:
            close_all(fds)
            raise Unavailable(f"no file descriptor left on the node: {error.strerror}; try again") from None
        gone = [slab for slab in message.mapped if not self._dram.has_slab(slab)]
        session.reply(header.request_id, MapSlabsReply(sizes, gone), fds=fds, on_sent=lambda: close_all(fds))

    def _open_index(self, session: Session, header: FrameHeader, message: OpenIndex) -> None:
        peer = peer_of(session)
        if not session.is_local:
            raise InvalidArgument("OpenIndex needs a Unix socket")
        answer, fds = self._shared_index.attach(session, peer.tenant, lambda: self._table.blocks_of(peer.tenant))
        session.reply(header.request_id, answer, fds=fds, on_sent=lambda: close_all(fds))

    def _export_slabs(self, session: Session, header: FrameHeader, message: ExportSlabs) -> None:
        peer = peer_of(session)
        peer.forget_freed(self._dram.has_slab)
        if peer.blocks is not None and not peer.pointed_at.issuperset(message.slabs):
            raise Denied("the pass of this node does not cover blocks in these slabs")
        if self._regions is None or len(message.slabs) > MAX_SLABS:
            raise InvalidArgument(f"ExportSlabs needs a transfer engine and at most {MAX_SLABS} slabs; got {len(message.slabs)}")
        session.reply(header.request_id, ExportSlabsReply([self._regions.export_slab(slab, tenant=peer.tenant) for slab in message.slabs]))

    def _export(self, peer: Caller, slab: int, writable: bool, fds: list[int]) -> int:
        """Append a descriptor of the slab and return its size; 0 if the tenant has no such slab."""
        try:
            fds.append(self._dram.slab_fd(slab, writable=writable, tenant=peer.tenant))
        except (StaleHandle, Unauthorized):  # one answer for both hides other tenants' slabs
            return 0
        return self._dram.slab_bytes(slab)

    def _events(self, session: Session, header: FrameHeader, message: FetchEvents) -> None:
        tenant = peer_of(session).tenant
        for _ in range(STEPS_PER_RING):
            self._take_accesses(session)
        session.reply(header.request_id, self._table.events.answer(session, tenant, message))

    # --- the master's commands ---

    def link_up(self, link: Session, epoch: int, partition: int = 0) -> None:
        """Accept commands of the partition's master over `link`, under this registration epoch."""
        self.links[partition], self._epochs[partition] = link, epoch
        self._table.forget_secondary(lambda key: self._partition_map.of(key) == partition)
        self._unconfirmed_pins[partition] = {name for name in self._pinned if self._partition_map.of(name[1]) == partition}
        self._drainer.drain(DRAIN_OFF, partition)  # a former master's drain ends; this one repeats its own

    def synced(self, partition: int = 0) -> None:
        """Unpin what the partition's master did not confirm. It has the inventory and has sent its pins before, so
        other pins ended while it was unreachable."""
        for tenant, key in self._unconfirmed_pins.pop(partition, set()):
            self._set_pinned(tenant, key, False)
        self._waiting.retry()

    def link_down(self, partition: int = 0) -> None:
        """Stop accepting commands for the partition. Clients are served as before."""
        self.links.pop(partition, None)
        self._authenticator.link_down(partition)

    def _check_epoch(self, session: Session, epoch: int) -> int:
        """Return the partition whose master sent the command. Raises StaleEpoch for a former master. `_allowed` has
        checked that the session is a master's."""
        partition = next(partition for partition, link in self.links.items() if link is session)
        newest = self._authenticator.master_epochs.get(partition, 0)
        if epoch < newest:
            raise StaleEpoch(f"command of master epoch {epoch} refused: epoch {newest} was seen")
        self._authenticator.master_epochs[partition] = epoch
        return partition

    def _delete_blocks(self, session: Session, header: FrameHeader, message: DeleteBlocks) -> None:
        """Delete blocks. The answer follows once the deletions are durable and stands for their events. An error means
        that a device did not make them durable: the blocks are deleted here and may return after a restart."""
        self._check_epoch(session, message.epoch)
        self._shared_index.take_accesses(self._table.record_local_reads, message.tenant)  # accesses of blocks that are about to be deleted
        self._shared_index.take_holds(message.tenant)
        copies, flags, dropped = self._table.copies, bytearray(), dict[Block, None]()
        was_moving = False
        for key, generation in zip(message.keys, message.generations, strict=True):
            block = self._table.find(message.tenant, key)
            if block is None or block.generation > generation:
                flags.append(1)  # already deleted: the master must not keep it
                was_moving = True  # its move may still be in progress
            elif message.force or not (block.readers or block.pinned or block.hold_bits or copies.is_protected(block)):
                was_moving |= block.moving
                dropped[block] = None
                self._pinned.discard((message.tenant, key))
                flags.append(1)
            else:
                flags.append(0)
        copies.drop_each(list(dropped))

        def answer(failure: KVStoreError | None) -> None:
            if failure is None:
                session.reply(header.request_id, Flags(bytes(flags)))
            else:
                session.fail(header.request_id, failure)

        (self._mover.flush_after_moves if was_moving else self._mover.flush)(answer)
        self._waiting.retry()

    def _pin(self, session: Session, header: FrameHeader, message: SetPinned) -> None:
        self._check_epoch(session, message.epoch)
        flags = bytearray()
        for key in message.keys:
            flags.append(self._set_pinned(message.tenant, key, bool(message.pinned)))
        session.reply(header.request_id, Flags(bytes(flags)))
        if not message.pinned:
            self._waiting.retry()

    def _set_pinned(self, tenant: str, key: bytes, pinned: bool) -> bool:
        """Pin or unpin the block. Return True if it exists."""
        for unconfirmed in self._unconfirmed_pins.values():
            unconfirmed.discard((tenant, key))
        block = self._table.find(tenant, key)
        if block is not None:
            block.pinned = pinned
        if block is not None and pinned:
            self._pinned.add((tenant, key))
        else:
            self._pinned.discard((tenant, key))
        return block is not None

    def _copy(self, session: Session, header: FrameHeader, message: CopyBlocks) -> None:
        partition = self._check_epoch(session, message.epoch)
        hello = Hello(ROLE_NODE, message.tenant, "", self._identity.name, message.epoch, message.ticket, partition)
        session.reply(header.request_id, Flags(self._replica_queue.take(message, hello, session.span(header.request_id))))

    def _prefetch_for_engine(self, session: Session, header: FrameHeader, message: PrefetchBlocks) -> None:
        """Queue promotions of the node's own blocks, or request copies from the masters of the keys. Answered at once:
        results appear as copies that the masters order."""
        self._check_epoch(session, message.epoch)
        session.reply(header.request_id, Ok())
        if not message.source:
            if not self._drainer.is_closed:
                self._prefetcher.queue(message.tenant, message.keys)
            return
        for partition, part in self._by_partition(message.keys).items():
            if (link := self.links.get(partition)) is not None:
                want = RequestCopy(self._epochs[partition], message.tenant, message.source, part)
                request_master(link, want, Flags, lambda _reply: None)

    def _mark_secondary(self, session: Session, header: FrameHeader, message: MarkSecondary) -> None:
        self._check_epoch(session, message.epoch)
        (self._table.mark_primary if message.is_over else self._table.mark_secondary)(message.tenant, message.keys)
        session.reply(header.request_id, Ok())

    def _drain(self, session: Session, header: FrameHeader, message: SetDraining) -> None:
        self._drainer.drain(message.mode, self._check_epoch(session, message.epoch))
        session.reply(header.request_id, Ok())

    def _ticket_key(self, session: Session, header: FrameHeader, message: TicketKey) -> None:
        partition = self._check_epoch(session, message.epoch)
        self._authenticator.add_key(message.key_id, message.secret, age_ms=message.age_ms, partition=partition)
        session.reply(header.request_id, Ok())

    def _revoke(self, session: Session, header: FrameHeader, message: RevokeCredentials) -> None:
        """End the sessions of revoked credentials and invalidate the regions exported to the tenant, then answer."""
        self._check_epoch(session, message.epoch)
        ended = self._authenticator.revoke(message.tenant, set(message.credentials))
        if self._regions is not None:
            self._regions.close_exports(message.tenant)
        session.reply(header.request_id, Count(ended))


def _check_retain(message: Retain) -> None:
    """Raises InvalidArgument for values out of range."""
    if message.priority > PRIORITIES or message.cause not in (RETAIN_READ, RETAIN_PUT, RETAIN_SET):
        raise InvalidArgument(f"Retain has priority {message.priority} and cause {message.cause}: at most {PRIORITIES} and {RETAIN_SET}")
    if max(message.ttl_ms, message.reuse_ms) > MAX_RETENTION_S * 1000 or message.session == SEVERAL_SESSIONS:
        raise InvalidArgument(f"Retain has a time over {MAX_RETENTION_S:.0f} s, or a reserved session")


def _check_same(session: Session, message: Hello) -> None:
    """Raises Denied if the connection has authenticated as another caller: its leases and puts would have two owners. A
    node's tenant changes with each pass."""
    known, is_node = session.context, message.role == ROLE_NODE
    if isinstance(known, Caller) and (known.is_node is not is_node or not (is_node or known.tenant == message.tenant)):
        raise Denied(f"this connection is authenticated as {known.identity}, tenant {known.tenant!r}: open another one")
