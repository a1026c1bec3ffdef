"""A node's services on real sockets: the reactor runs in a thread; the master is a stub that acknowledges or not."""

import contextlib
import functools
import mmap
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from kvstore.protocol.catalog_messages import Publish
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import (
    INLINE,
    MAPPED,
    CommitPuts,
    MapSlabs,
    OpenSlots,
    OpenSlotsReply,
    Put,
    ReadBlocks,
    ReadBlocksReply,
    ReleaseLeases,
)
from kvstore.protocol.session_messages import ROLE_CLIENT, Flags, Hello
from kvstore.rpc.address import parse_address, socket_id
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.frame_writer import SendLimits
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.server import ConnectionLimits, NullHandler, Server
from kvstore.rpc.server.session import DEFAULT_LIMITS, Session
from kvstore.security.identity import Identity as Bearer
from kvstore.security.identity import IdentityKind, Role
from kvstore.security.tickets.issuer import Issuer
from kvstore.store.block_table.block import Block
from kvstore.store.config import NodeSettings
from kvstore.store.identity import NodeIdentity
from kvstore.store.node_service import NodeService
from kvstore.store.replication.event_replicator import EventReplicator, EventReplicators
from kvstore.store.session_authenticator import SessionAuthenticator
from kvstore.store.storage import Storage
from kvstore.testing.transfer.awaited import eventually
from kvstore.transfer.engine import TransferEngine
from tests.rpc.wires import frame, read_frame
from tests.store.integrity import check
from tests.store.tables import Store

T = TypeVar("T")
TIMEOUT_S = 10.0
MAX_WAITING = 3
MAX_LEASE_NS = 60 * 10**9
GRACE_S = 100.0


def digest(value: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(value)


class Served(Storage):
    """The services, and the store below them. Use `call` to run a function in the loop's thread."""

    def __init__(
        self,
        folder: Path,
        *,
        dram_bytes: int = 1 << 20,
        needs_tickets: bool = False,
        engine: TransferEngine | None = None,
        limits: SendLimits = DEFAULT_LIMITS,
        read_bytes: int = 256 << 20,
        claim_interval_s: float = 0.0,
        demotion_wait_s: float = 3600,
        **options: Any,
    ) -> None:
        """With an `engine` clients of other hosts read and write by it; its maker closes it."""
        self.reactor = self._reactor = Reactor()
        self._open_store(folder, dram_bytes, options)
        self.engine = engine
        self._settings = NodeSettings(
            demotion_wait_s=demotion_wait_s,
            move_batch=1 << 20,
            read_threads=1,
            tier_retry_s=3600,
            read_bytes=read_bytes,
            peer_bytes=limits.queued_bytes,
            peer_requests=MAX_WAITING,
            max_lease_s=MAX_LEASE_NS / 1e9,
            claim_interval_s=claim_interval_s,
            copy_batch=16 << 10,
            copy_queue=100,
            copy_timeout_s=TIMEOUT_S,
        )
        self._assemble(None)
        self._serve(folder, limits, needs_tickets=needs_tickets)
        self.acknowledges = True
        self.unanswered: list[Callable[[KVStoreError | None], None]] = []
        self.replicator.link_up(self._publish, 1, lambda: None)
        self._thread = threading.Thread(target=self.reactor.run, name="served")
        self._thread.start()

    def _open_store(self, folder: Path, dram_bytes: int, options: Mapping[str, Any]) -> None:
        """The store, and the stub of its master."""
        self.store = Store(dram_bytes, folder=folder / "nvme", **options)
        self.table, self.dram, self.shared_index = self.store.table, self.store.dram, self.store.shared_index
        self.partition_map, self.codec, self._tiers = self.store.partition_map, self.store.codec, self.store.tiers
        self.replicators = EventReplicators(
            self.store.table.blocks, self.partition_map, lambda parts: EventReplicator(parts, batch_events=100, max_in_flight=4)
        )
        self.replicator = self.replicators[0]
        self.store.emit = self.replicator.emit

    def _serve(self, folder: Path, limits: SendLimits, *, needs_tickets: bool) -> None:
        """Listen; who connects has the service."""
        self.authenticator = SessionAuthenticator(clock_ns=self.reactor.now_ns, grace_s=GRACE_S)
        self.issuer = Issuer(ticket_ttl_s=TIMEOUT_S, key_ttl_s=TIMEOUT_S, random_bytes=os.urandom)
        self.authenticator.registered(node_id=5, master_epoch=0, issuer="test", needs_tickets=needs_tickets)
        key = self.issuer.register(5, self.reactor.now_ns())
        self.authenticator.add_key(key.key_id, key.secret, age_ms=0)
        self.server = Server(self.reactor, NullHandler(), ConnectionLimits(100), send_limits=limits)
        self.tcp = self.server.listen_tcp("127.0.0.1", 0)
        self.unix = self.server.listen_unix(folder / "node.sock")
        identity = NodeIdentity("node", "1", socket_id(self.unix), self.unix, self.tcp, instance=77)
        self.service = NodeService(self, self.authenticator, identity)
        self.server.handler = self.service
        self.reactor.after_events += [self.drainer.step, self.mover.start_moves, self.replicator.flush, self.commit_batcher.flush]

    def _publish(self, message: Publish, answered: Callable[[KVStoreError | None], None]) -> None:
        if self.acknowledges:
            self.reactor.call_soon(lambda: answered(None))
        else:
            self.unanswered.append(answered)

    def call(self, function: Callable[[], T]) -> T:
        return self.reactor.call(function, deadline_s=TIMEOUT_S)

    def settled(self) -> None:
        """Come back when what is under way in the loop and in the mover has been served."""
        for _ in range(3):
            answers: queue.SimpleQueue[object] = queue.SimpleQueue()
            self.call(functools.partial(self.mover.flush_after_moves, answers.put))
            answers.get(timeout=TIMEOUT_S)
            self.call(lambda: None)

    def connect(self, *, tcp: bool = False, tenant: str = "red", ticket: bytes = b"") -> "Client":
        address = parse_address(self.tcp if tcp else f"unix:{self.unix}")
        return Client(Channel.open(address, Hello(ROLE_CLIENT, tenant, ticket=ticket), Deadline(TIMEOUT_S)))

    def ticket(self, tenant: str = "red", role: Role = Role.WRITE, *, left_s: float = TIMEOUT_S, credential: str = "one") -> bytes:
        """As the master would issue it."""
        bearer = Bearer(IdentityKind.TENANT, role, tenant, credential)
        return self.call(lambda: self.issuer.issue_ticket(5, bearer, left_s=left_s, now_ns=self.reactor.now_ns()))

    def demote(self, *names: str) -> None:
        """Have these blocks of red leave DRAM for NVMe."""

        def evict() -> list[Block]:
            blocks = [block for name in names if (block := self.store.table.find("red", name.encode())) is not None]
            for block in blocks:
                self.store.table.evictor.evict(block, self.store.table._ingest_tier)
            return blocks

        blocks = self.call(evict)
        self.settled()
        assert self.call(lambda: [block.tier_mask() for block in blocks]) == [4] * len(names)

    def link(self) -> socket.socket:
        """The master's end of this node's link."""
        ours, theirs = socket.socketpair()

        def adopt() -> None:
            self.service.links[0] = Session(self.reactor, ours, self.service)

        self.call(adopt)
        return theirs

    def close(self) -> None:
        self.reactor.stop()
        self._thread.join()
        self.server.close()
        for link in list(self.service.links.values()):
            link.close()
        self.replicator.close()
        self.replica_queue.close()
        self._verifier.close()
        self.mover.close()
        check(self.reads._limiter)
        check(self.store.table)
        self.store.close()
        self.reactor.close()


class Client:
    """A client's end of one connection: it maps slabs as it meets them, and checks what it reads."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._maps: dict[tuple[int, bool], mmap.mmap] = {}

    def ask(self, message: Message, answer: type[T], *, timeout_s: float = TIMEOUT_S, payload: Sequence[bytes] = ()) -> T:
        return self.channel.call(message, answer, Deadline(timeout_s), payload)  # type: ignore[type-var]

    def put(
        self, values: Mapping[str, bytes], *, timeout_s: float = TIMEOUT_S, generation: int = 1, checksums: Sequence[int] = ()
    ) -> list[int]:
        """Put through the socket; the flags."""
        keys = [name.encode() for name in values]
        message = Put(
            "ns",
            keys,
            [len(value) for value in values.values()],
            [generation] * len(keys),
            checksums or [digest(value) for value in values.values()],
            [b""] * len(keys),
        )
        return list(self.ask(message, Flags, timeout_s=timeout_s, payload=list(values.values())).flags)

    def open(self, sizes: Mapping[str, int], *, timeout_s: float = TIMEOUT_S, generation: int = 1, engine: int = 0) -> OpenSlotsReply:
        count = len(sizes)
        keys = [name.encode() for name in sizes]
        return self.ask(
            OpenSlots("ns", keys, list(sizes.values()), [generation] * count, [b""] * count, engine), OpenSlotsReply, timeout_s=timeout_s
        )

    def write(self, opened: OpenSlotsReply, index: int, value: bytes) -> None:
        """Through the mapping of the slab."""
        offset = opened.offsets[index]
        self.map(opened.slabs[index], writable=True)[offset : offset + len(value)] = value

    def commit(self, opened: OpenSlotsReply, values: Sequence[bytes]) -> list[int]:
        return list(self.ask(CommitPuts(list(opened.put_ids), [digest(value) for value in values]), Flags).flags)

    def map(self, slab: int, *, writable: bool = False) -> mmap.mmap:
        if (slab, writable) not in self._maps:
            sizes, (fd,) = self.slabs([slab], writable=writable)
            try:
                access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
                self._maps[slab, writable] = mmap.mmap(fd, sizes[0], mmap.MAP_SHARED, access)
            finally:
                os.close(fd)
        return self._maps[slab, writable]

    def slabs(self, slabs: Sequence[int], *, writable: bool = False) -> tuple[list[int], list[int]]:
        """(sizes, descriptors)"""
        answer, fds = self.channel.call_for_fds(MapSlabs(list(slabs), int(writable)), Deadline(TIMEOUT_S))
        return list(answer.sizes), fds

    def ask_blocks(
        self, *names: str, inline_bytes: int = 0, lease_ms: int = 10_000, generations: Sequence[int] = (), engine: int = 0
    ) -> ReadBlocksReply:
        keys = [name.encode() for name in names]
        return self.ask(ReadBlocks(keys, generations or [0] * len(keys), inline_bytes, lease_ms, engine), ReadBlocksReply)

    def read(
        self, *names: str, inline_bytes: int = 0, lease_ms: int = 10_000, generations: Sequence[int] = ()
    ) -> tuple[ReadBlocksReply, list[bytes | None]]:
        """The answer and the values, None for a miss."""
        blocks = self.ask_blocks(*names, inline_bytes=inline_bytes, lease_ms=lease_ms, generations=generations)
        values: list[bytes | None] = [None] * len(names)
        for index, status in enumerate(blocks.statuses):
            if status == INLINE:
                value = bytearray(blocks.sizes[index])
                self.channel.read_into([memoryview(value)], Deadline(TIMEOUT_S))
                values[index] = bytes(value)
        for index, status in enumerate(blocks.statuses):
            if status == MAPPED:
                offset = blocks.offsets[index]
                values[index] = self.map(blocks.slabs[index])[offset : offset + blocks.sizes[index]]
        for found, checksum in zip(values, blocks.checksums, strict=True):
            assert found is None or digest(found) == checksum
        return blocks, values

    def release(self, *leases: int) -> None:
        self.channel.post(ReleaseLeases(list(leases)))

    def close(self) -> None:
        self.channel.close()
        for one in self._maps.values():
            one.close()


class Master:
    """The master's end of a link: commands out, answers in."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(TIMEOUT_S)
        self._sock = sock

    def ask(self, message: Message) -> Message:
        self._sock.sendall(frame(message))
        return read_frame(self._sock)[1]

    def close(self) -> None:
        self._sock.close()


@contextlib.contextmanager
def served(folder: Path, *, needs_tickets: bool = False, engine: TransferEngine | None = None, **options: Any) -> Iterator[Served]:
    node = Served(folder, needs_tickets=needs_tickets, engine=engine, **options)
    try:
        yield node
    finally:
        node.close()


def until(node: Served, condition: Callable[[], bool]) -> None:
    """Come back when the condition holds in the loop."""
    eventually(lambda: node.call(condition), "a condition in the loop")


def in_background(function: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    """Run `function` in a thread; its result, or its exception, will be in the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results
