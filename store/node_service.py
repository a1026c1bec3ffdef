"""The node's frames: who may speak, which service answers, and what is tidied up when a connection ends."""

from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.protocol.catalog_messages import (
    DRAIN_OFF,
    CopyBlocks,
    DeleteBlocks,
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
    Put,
    PutFromSlot,
    ReadBlocks,
    ReleaseHolds,
    ReleaseLeases,
    WaitCommitted,
)
from kvstore.protocol.session_messages import ROLE_NODE, SERVER_NODE, Count, Flags, Hello, Ok, Welcome
from kvstore.rpc.server.lingering_peer import LingeringPeer
from kvstore.rpc.server.session import Session
from kvstore.rpc.server.tenant_loads import TenantLoads
from kvstore.security.identity import MASTER, UNAUTHENTICATED
from kvstore.security.permissions import NODE_FRAMES, WRITES, allowed_frames, check, check_complete, denial
from kvstore.store.block_table.block import Block
from kvstore.store.identity import NodeIdentity
from kvstore.store.master_requests import ask
from kvstore.store.session_authenticator import MAX_SLABS, Caller, SessionAuthenticator, peer_of
from kvstore.store.shared_index.index_writer import TURNS_OF_A_RING
from kvstore.store.shared_memory import close_all
from kvstore.store.storage import Storage
from kvstore.store.writes.commit_batcher import CommitBatcher

MAX_TENANT_BYTES = 128
"""What the master takes: events about a longer name would be refused for ever."""
_OF_STRANGERS = allowed_frames(NODE_FRAMES, UNAUTHENTICATED)
_OF_THE_MASTER = allowed_frames(NODE_FRAMES, MASTER)


class NodeService:
    """The transfer Handler of a node, for its clients and for its link to the master. The node's loop is the only caller."""

    def __init__(self, storage: Storage, admission: SessionAuthenticator, identity: NodeIdentity) -> None:
        """`identity` is what the node reports of itself to a caller that introduces itself."""
        self._table = storage.table
        self._dram = storage.dram
        self._mover = storage.mover
        self._leases = storage.leases
        self._waiting = storage.waiting
        self._in_place = storage.in_place
        self._sent = storage.sent
        self._reads = storage.reads
        self._regions = storage.regions
        self._copies = storage.copies
        self._showing = storage.showing
        self._answers = storage.answers
        self._leaving = storage.leaving
        self._partitioning = storage.partitioning
        self._admission = admission
        self._identity = identity
        self.loads = TenantLoads()
        """Of connections and requests of clients."""
        self._lingering: set[LingeringPeer] = set()
        """Writers of this host on whom this side has hung up, and who may write yet."""
        self._held: set[tuple[str, bytes]] = set()
        """Tenant and key of the blocks that a master has pinned here."""
        self._unheard: dict[int, set[tuple[str, bytes]]] = {}
        """Of these, what the master of the present link of each partition has not said so of."""
        self.links: dict[int, Session] = {}
        """The connections of the masters, by partition: the only ones that may command."""
        self._epochs: dict[int, int] = {}
        """Of the registrations of these."""
        self._handlers = self._handlers_by_type(storage.deciding)
        check_complete(NODE_FRAMES, [Put.TYPE, *self._handlers])

    def _handlers_by_type(self, deciding: CommitBatcher) -> dict[int, Callable[[Session, FrameHeader, Any], None]]:
        """Of all frames but Put, whose values come behind it."""
        return {
            Hello.TYPE: self._hello,
            OpenSlots.TYPE: self._open,
            CommitPuts.TYPE: self._in_place.commit,
            AbortPuts.TYPE: self._in_place.abort,
            OpenSlotAhead.TYPE: self._open_ahead,
            PutFromSlot.TYPE: self._put_ahead,
            ReadBlocks.TYPE: self._reads.read,
            ReleaseLeases.TYPE: self._release,
            MapSlabs.TYPE: self._slabs,
            OpenIndex.TYPE: self._attach,
            ExportSlabs.TYPE: self._show_regions,
            DeleteBlocks.TYPE: self._drop,
            SetPinned.TYPE: self._hold,
            CopyBlocks.TYPE: self._copy,
            SetDraining.TYPE: self._drain,
            FetchEvents.TYPE: self._events,
            WaitCommitted.TYPE: deciding.await_all,
            HoldBlocks.TYPE: self._hold_blocks,
            ReleaseHolds.TYPE: self._release_holds,
            TicketKey.TYPE: self._ticket_key,
            RevokeCredentials.TYPE: self._revoke,
            PrefetchBlocks.TYPE: self._seek,
        }

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        if header.type == Put.TYPE:
            self._sent.arrived(session, header)  # its message was read when its payload began
            return
        handler = self._handlers.get(header.type)
        if handler is None:
            raise ProtocolError(f"a node takes no message of type {header.type}")
        kind = MESSAGES[header.type]
        if header.type not in self._allowed(session):
            self._refuse(session, kind)
        handler(session, header, kind.unpack(body))

    def _allowed(self, session: Session) -> frozenset[int]:
        """The frames that may come by this session."""
        caller = session.context
        if caller is not None:
            found: frozenset[int] = caller.allowed
            return found
        return _OF_THE_MASTER if session in self.links.values() else _OF_STRANGERS

    def _refuse(self, session: Session, kind: type[Message]) -> None:
        who = session.context.identity if isinstance(session.context, Caller) else UNAUTHENTICATED
        raise denial(NODE_FRAMES[kind.TYPE], who, kind.__name__)

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> list[memoryview] | None:
        if header.type != Put.TYPE:
            raise ProtocolError(f"a message of type {header.type} has no payload")
        if header.type not in self._allowed(session):
            self._refuse(session, Put)
        self._leaving.check_open()
        self._take_accesses(session)
        if self._sent.at_once.payload(session, header, body):
            return None
        return self._sent.payload(session, header, Put.unpack(body))

    def _put_at_once(self, tenant: str, session: Session, frame: memoryview) -> bool:
        """A session's `at_once`: whether this is a put that has been served: a small one, or one into a slot that was opened ahead."""
        kind = kind_of(frame)
        if kind not in (Put.TYPE, PutFromSlot.TYPE) or self._leaving.is_closed:
            return False
        self._showing.take_accesses(self._table.read_unasked, tenant)
        serve = self._sent.at_once.frame if kind == Put.TYPE else self._in_place.ahead.frame
        return serve(session, tenant, frame)

    def _open(self, session: Session, header: FrameHeader, message: OpenSlots) -> None:
        self._leaving.check_open()
        self._take_accesses(session)
        self._in_place.open(session, header, message)

    def _open_ahead(self, session: Session, header: FrameHeader, message: OpenSlotAhead) -> None:
        self._leaving.check_open()
        self._take_accesses(session)
        self._in_place.ahead.open(session, header, message)

    def _put_ahead(self, session: Session, header: FrameHeader, message: PutFromSlot) -> None:
        self._leaving.check_open()
        self._take_accesses(session)
        self._in_place.ahead.put(session, header, message)

    def _take_accesses(self, session: Session) -> None:
        """What the tenant's clients have read by themselves comes before a put that makes room."""
        if isinstance(session.context, Caller):
            self._showing.take_accesses(self._table.read_unasked, session.context.tenant)

    def closed(self, session: Session) -> None:
        """Everything a connection held goes with it: leases, open puts, its place in the line, answers that wait for the master."""
        tidying: list[Callable[[Session], None]] = [
            lambda owner: self._showing.take_last(self._table.read_unasked, owner),
            self._waiting.forget_owner,
            self._answers.forget_owner,
            self._reads.forget_owner,
            self._leases.forget_owner,
            self._table.holds.forget_owner,
            self._forget_writer,
            self._table.events.forget_asker,
            self._showing.forget_owner,
            self._admission.forget,
            self.loads.leave,
        ]
        for forget in tidying:  # what one of them raises is no reason to keep the rest
            session.reactor.guarded(forget, session)
        self._waiting.retry()

    def _forget_writer(self, session: Session) -> None:
        """What the connection's puts had is free once nobody can write there.

        A writer of this host has it mapped, and may be stopped in the middle of a copy: where this side has ended the connection, its slots
        wait until it closes its end.
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
        """Wait for no peer any more: the memory that they may write is about to go. A second close is a no-op."""
        while self._lingering:
            self._lingering.pop().close()

    def _hello(self, session: Session, header: FrameHeader, message: Hello) -> None:
        if len(message.tenant) > MAX_TENANT_BYTES or len(message.tenant.encode()) > MAX_TENANT_BYTES:
            raise InvalidArgument(f"a tenant's name is at most {MAX_TENANT_BYTES} bytes long")
        _check_same(session, message)
        caller = self._admission.admit(session, message)
        if not caller.is_node:
            try:
                session.set_tenant_load(self.loads.enter(session, caller.tenant))
            except KVStoreError:
                self._admission.forget(session)
                raise
        session.context = caller
        session.fast_path = partial(self._put_at_once, caller.tenant) if Put.TYPE in caller.allowed else None
        own = self._identity
        welcome = Welcome(SERVER_NODE, own.name, self._admission.node_id, own.instance, own.host_id, own.unix)
        session.welcome(header.request_id, welcome)

    def _release(self, session: Session, header: FrameHeader, message: ReleaseLeases) -> None:
        self._reads.release(session, message)
        self._waiting.retry()

    def _hold_blocks(self, session: Session, header: FrameHeader, message: HoldBlocks) -> None:
        """Unlike a read this is no access: a lookup alone keeps nothing warm."""
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

    def _slabs(self, session: Session, header: FrameHeader, message: MapSlabs) -> None:
        peer = peer_of(session)
        if message.writable:
            check(WRITES, peer.identity, "MapSlabs for writing")
        if not session.is_local or len(message.slabs) > MAX_SLABS:
            raise InvalidArgument(f"slabs are passed over Unix sockets, at most {MAX_SLABS} at once")
        if len(message.mapped) > MAX_BATCH:
            raise InvalidArgument(f"a client is told of at most {MAX_BATCH} slabs at once, not {len(message.mapped)}")
        peer.forget_gone(self._dram.has_slab)
        fds: list[int] = []
        try:
            sizes = [self._export(peer, slab, bool(message.writable), fds) for slab in message.slabs]
        except OSError as error:
            close_all(fds)
            raise Unavailable(f"no descriptor is left: {error.strerror}") from None
        gone = [slab for slab in message.mapped if not self._dram.has_slab(slab)]
        session.reply(header.request_id, MapSlabsReply(sizes, gone), fds=fds, on_sent=lambda: close_all(fds))

    def _attach(self, session: Session, header: FrameHeader, message: OpenIndex) -> None:
        peer = peer_of(session)
        if not session.is_local:
            raise InvalidArgument("an index is passed over Unix sockets")
        answer, fds = self._showing.attach(session, peer.tenant, lambda: self._table.blocks_of(peer.tenant))
        session.reply(header.request_id, answer, fds=fds, on_sent=lambda: close_all(fds))

    def _show_regions(self, session: Session, header: FrameHeader, message: ExportSlabs) -> None:
        peer = peer_of(session)
        peer.forget_gone(self._dram.has_slab)
        if peer.blocks is not None and not peer.pointed_at.issuperset(message.slabs):
            raise Denied("the pass of this node is for blocks in other slabs")
        if self._regions is None or len(message.slabs) > MAX_SLABS:
            raise InvalidArgument(f"this node has no transfer engine, or these are more than {MAX_SLABS} slabs at once")
        session.reply(header.request_id, ExportSlabsReply([self._regions.show_slab(slab, tenant=peer.tenant) for slab in message.slabs]))

    def _export(self, peer: Caller, slab: int, writable: bool, fds: list[int]) -> int:
        """Append a descriptor of the slab and return its size, or 0 for one that is not there."""
        try:
            fds.append(self._dram.slab_fd(slab, writable=writable, tenant=peer.tenant))
        except (StaleHandle, Unauthorized):  # one answer for both: another tenant's slab does not exist for this one
            return 0
        return self._dram.slab_bytes(slab)

    def _events(self, session: Session, header: FrameHeader, message: FetchEvents) -> None:
        """For a recorder."""
        tenant = peer_of(session).tenant
        for _ in range(TURNS_OF_A_RING):
            self._take_accesses(session)
        session.reply(header.request_id, self._table.events.answer(session, tenant, message))

    # --- the master's commands ---

    def link_up(self, link: Session, epoch: int, partition: int = 0) -> None:
        """The node is registered under this epoch: the partition's master commands it over `link` from now on."""
        self.links[partition], self._epochs[partition] = link, epoch
        self._unheard[partition] = {name for name in self._held if self._partitioning.of(name[1]) == partition}
        self._leaving.drain(DRAIN_OFF, partition)  # another master, or none, may have said so; this one says it if it is so

    def synced(self, partition: int = 0) -> None:
        """The partition's master has the inventory, and has named what is pinned of it before it said so: what it did not name was let go,
        or ended, while it was out of reach."""
        for tenant, key in self._unheard.pop(partition, set()):
            self._set_pinned(tenant, key, False)
        self._waiting.retry()

    def link_down(self, partition: int = 0) -> None:
        """Nobody commands the node there. Clients are served as before."""
        self.links.pop(partition, None)
        self._admission.link_down(partition)

    def _check_epoch(self, session: Session, epoch: int) -> int:
        """The partition whose master commands. Raises StaleEpoch for a former master. That it came over a link is seen to before: nobody
        else may say it."""
        partition = next(partition for partition, link in self.links.items() if link is session)
        newest = self._admission.master_epochs.get(partition, 0)
        if epoch < newest:
            raise StaleEpoch(f"a command of epoch {epoch}, but a master of epoch {newest} has spoken")
        self._admission.master_epochs[partition] = epoch
        return partition

    def _drop(self, session: Session, header: FrameHeader, message: DeleteBlocks) -> None:
        """Delete blocks; the answer comes after the deletions are durable, and the master takes it for their events. It is an error where a
        device did not let them become durable: the blocks are gone from here, and may come back with the next process."""
        self._check_epoch(session, message.epoch)
        self._showing.take_accesses(self._table.read_unasked, message.tenant)  # of what is about to go
        self._showing.take_holds(message.tenant)
        copies, flags, dropped = self._table.copies, bytearray(), dict[Block, None]()
        was_moving = False
        for key, generation in zip(message.keys, message.generations, strict=True):
            block = self._table.find(message.tenant, key)
            if block is None or block.generation > generation:
                flags.append(1)  # evicted, or dropped by another command: the master must not take it for one that stays
                was_moving |= block is None  # that may still be under way
            elif message.force or not (block.readers or block.pinned or block.hold_bits or copies.is_looked_at(block)):
                was_moving |= block.moving
                dropped[block] = None
                self._held.discard((message.tenant, key))
                flags.append(1)
            else:
                flags.append(0)
        copies.drop_each(list(dropped))

        def answer(failure: KVStoreError | None) -> None:
            if failure is None:
                session.reply(header.request_id, Flags(bytes(flags)))
            else:
                session.fail(header.request_id, failure)

        # A copy under way reaches its tier before the first flush ends, and is deleted only after that.
        self._mover.flush((lambda _failure: self._mover.flush(answer)) if was_moving else answer)
        self._waiting.retry()

    def _hold(self, session: Session, header: FrameHeader, message: SetPinned) -> None:
        self._check_epoch(session, message.epoch)
        flags = bytearray()
        for key in message.keys:
            flags.append(self._set_pinned(message.tenant, key, bool(message.pinned)))
        session.reply(header.request_id, Flags(bytes(flags)))
        if not message.pinned:
            self._waiting.retry()

    def _set_pinned(self, tenant: str, key: bytes, pinned: bool) -> bool:
        """Is it there?"""
        for unheard in self._unheard.values():
            unheard.discard((tenant, key))
        block = self._table.find(tenant, key)
        if block is not None:
            block.pinned = pinned
        if block is not None and pinned:
            self._held.add((tenant, key))
        else:
            self._held.discard((tenant, key))
        return block is not None

    def _copy(self, session: Session, header: FrameHeader, message: CopyBlocks) -> None:
        partition = self._check_epoch(session, message.epoch)
        hello = Hello(ROLE_NODE, message.tenant, "", self._identity.name, message.epoch, message.ticket, partition)
        session.reply(header.request_id, Flags(self._copies.take(message, hello, session.span(header.request_id))))

    def _seek(self, session: Session, header: FrameHeader, message: PrefetchBlocks) -> None:
        """Answered at once; what comes of it shows in the copies that the masters order."""
        self._check_epoch(session, message.epoch)
        session.reply(header.request_id, Ok())
        keys: dict[int, list[bytes]] = {}
        for key in message.keys:
            keys.setdefault(self._partitioning.of(key), []).append(key)
        for partition, part in keys.items():
            if (link := self.links.get(partition)) is not None:
                want = RequestCopy(self._epochs[partition], message.tenant, message.source, part)
                ask(link, want, Ok, lambda _reply: None)

    def _drain(self, session: Session, header: FrameHeader, message: SetDraining) -> None:
        self._leaving.drain(message.mode, self._check_epoch(session, message.epoch))
        session.reply(header.request_id, Ok())

    def _ticket_key(self, session: Session, header: FrameHeader, message: TicketKey) -> None:
        partition = self._check_epoch(session, message.epoch)
        self._admission.add_key(message.key_id, message.secret, age_ms=message.age_ms, partition=partition)
        session.reply(header.request_id, Ok())

    def _revoke(self, session: Session, header: FrameHeader, message: RevokeCredentials) -> None:
        """Answered once the sessions are over; what they had been shown of memory is shown to nobody any more."""
        self._check_epoch(session, message.epoch)
        ended = self._admission.revoke(message.tenant, set(message.credentials))
        if self._regions is not None:
            self._regions.hide(message.tenant)
        session.reply(header.request_id, Count(ended))


def _check_same(session: Session, message: Hello) -> None:
    """Raises Denied where the connection is another's already: what it holds, and what ends it, would be of two. Nodes' change their
    tenants with each pass."""
    known, is_node = session.context, message.role == ROLE_NODE
    if isinstance(known, Caller) and (known.is_node is not is_node or not (is_node or known.tenant == message.tenant)):
        raise Denied(f"this connection is of {known.identity}, tenant {known.tenant!r}: open another one to be somebody else")
