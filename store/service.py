"""The node's frames: who may speak, which service answers, and what is tidied up when a connection ends."""

import hashlib
import hmac
import os
from collections.abc import Callable, Mapping
from typing import Any

from kvstore.protocol.errors import InvalidArgument, ProtocolError, StaleEpoch, StaleHandle, Unauthorized, Unavailable
from kvstore.protocol.frames import Header
from kvstore.protocol.messages import (
    MESSAGES,
    SERVER_NODE,
    Abort,
    Commit,
    Drop,
    Flags,
    Hello,
    Hold,
    Open,
    Put,
    Read,
    Release,
    SlabFds,
    Slabs,
    Welcome,
)
from kvstore.store.leases import Leases
from kvstore.store.mover import Mover
from kvstore.store.peer import Peer, peer_of
from kvstore.store.puts import PutService
from kvstore.store.reads import ReadService
from kvstore.store.table import BlockTable
from kvstore.store.waiting import WaitingRoom
from kvstore.tiers.dram import DramTier
from kvstore.transfer.address import host_id
from kvstore.transfer.session import Session

MAX_SLABS = 64
"""Descriptors in one answer; the kernel passes at most 253."""


class NodeService:
    """The transfer Handler of a node, for its clients and for its link to the master. The node's loop is the only caller."""

    def __init__(
        self,
        table: BlockTable,
        dram: DramTier,
        mover: Mover,
        leases: Leases,
        waiting: WaitingRoom,
        puts: PutService,
        reads: ReadService,
        *,
        name: str,
        instance: int,
    ) -> None:
        self._table = table
        self._dram = dram
        self._mover = mover
        self._leases = leases
        self._waiting = waiting
        self._puts = puts
        self._reads = reads
        self._name = name
        self._instance = instance
        self.unix_path = ""
        self.node_id = 0
        self.master_epoch = 0
        self.token_digests: Mapping[str, bytes] | None = None
        """Tenant to SHA-256 of its token, from the master; empty lets everyone in, None: not registered yet."""
        self.link: Session | None = None
        self._handlers: dict[int, Callable[[Session, Header, Any], None]] = {
            Hello.TYPE: self._hello,
            Open.TYPE: puts.open,
            Commit.TYPE: puts.commit,
            Abort.TYPE: puts.abort,
            Read.TYPE: reads.read,
            Release.TYPE: lambda session, header, message: reads.release(session, message),
            Slabs.TYPE: self._slabs,
            Drop.TYPE: self._drop,
            Hold.TYPE: self._hold,
        }

    def frame(self, session: Session, header: Header, body: memoryview) -> None:
        if header.type == Put.TYPE:
            self._puts.arrived(session, header)  # its message was read when its payload began
            return
        handler = self._handlers.get(header.type)
        if handler is None:
            raise ProtocolError(f"a node takes no message of type {header.type}")
        handler(session, header, MESSAGES[header.type].unpack(body))

    def payload(self, session: Session, header: Header, body: memoryview) -> list[memoryview] | None:
        if header.type != Put.TYPE:
            raise ProtocolError(f"a message of type {header.type} has no payload")
        return self._puts.payload(session, header, Put.unpack(body))

    def closed(self, session: Session) -> None:
        """Everything a connection held goes with it: leases, open puts, its place in the line."""
        self._waiting.forget_owner(session)
        self._leases.forget_owner(session)
        self._table.forget_owner(session)
        self._waiting.retry()

    def _hello(self, session: Session, header: Header, message: Hello) -> None:
        if self.token_digests is None:
            raise Unavailable("this node has not found its master yet; try again")
        if self.token_digests:
            digest = hashlib.sha256(message.token.encode()).digest()
            if not hmac.compare_digest(digest, self.token_digests.get(message.tenant, b"")):
                raise Unauthorized(f"unknown tenant {message.tenant!r} or wrong token")
        session.context = Peer(message.tenant, message.role)
        welcome = Welcome(SERVER_NODE, self._name, self.node_id, self._instance, host_id(), self.unix_path)
        session.reply(header.request_id, welcome)

    def _slabs(self, session: Session, header: Header, message: Slabs) -> None:
        peer = peer_of(session)
        if not session.is_local or len(message.slabs) > MAX_SLABS:
            raise InvalidArgument(f"slabs are passed over Unix sockets, at most {MAX_SLABS} at once")
        sizes, fds = [], []
        for slab in message.slabs:
            try:
                fds.append(self._dram.slab_fd(slab, writable=bool(message.writable), tenant=peer.tenant))
                sizes.append(self._dram.slab_bytes(slab))
            except (StaleHandle, Unauthorized):  # one answer for both: another tenant's slab does not exist for this one
                sizes.append(0)

        def close_fds() -> None:
            for fd in fds:
                os.close(fd)

        session.reply(header.request_id, SlabFds(sizes), fds=fds, on_sent=close_fds)

    # --- the master's commands ---

    def _check_master(self, session: Session, epoch: int) -> None:
        if session is not self.link:
            raise Unauthorized("only the master this node is registered with may command it")
        if epoch < self.master_epoch:
            raise StaleEpoch(f"a command of epoch {epoch}, but a master of epoch {self.master_epoch} has spoken")
        self.master_epoch = epoch

    def _drop(self, session: Session, header: Header, message: Drop) -> None:
        """Delete blocks; the answer comes after the deletions are durable and their events are on their way."""
        self._check_master(session, message.epoch)
        flags = bytearray()
        for key, generation in zip(message.keys, message.generations, strict=True):
            block = self._table.find(message.tenant, key)
            is_ours = block is not None and block.generation <= generation
            if block is not None and is_ours and (message.force or not (block.readers or block.pinned)):
                self._table.drop(block)
                flags.append(1)
            else:
                flags.append(0)
        self._mover.flush(lambda: session.reply(header.request_id, Flags(bytes(flags))))
        self._waiting.retry()

    def _hold(self, session: Session, header: Header, message: Hold) -> None:
        self._check_master(session, message.epoch)
        flags = bytearray()
        for key in message.keys:
            block = self._table.find(message.tenant, key)
            if block is not None:
                block.pinned = bool(message.pinned)
            flags.append(block is not None)
        session.reply(header.request_id, Flags(bytes(flags)))
        if not message.pinned:
            self._waiting.retry()
