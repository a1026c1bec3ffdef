"""TransferAgent over shared memory: maps regions of peers on this host, and copies with the processor.

A caller that waits copies in its own thread. Other requests, and the rest of a large batch, are copied by a few
threads.
"""

import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from kvstore.protocol.errors import (
    Broken,
    Closed,
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    ProtocolError,
    StaleHandle,
    Unavailable,
    Unreachable,
)
from kvstore.protocol.session_messages import Hello, Ok
from kvstore.protocol.transfers import MAX_NOTICE_BYTES, ROLE_AGENT, Attach, Notice
from kvstore.rpc.address import Address, is_local_socket
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.thread_pools import submit_once
from kvstore.transfer.agent import AgentRequest, Direction, Rail, Remote, TransferAgent, cancelled
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.mapped_memory import MappedSlab, map_slab
from kvstore.transfer.memory.memcpy import copy
from kvstore.transfer.memory.pieces import check_pieces, local_views, remote_regions, remote_views
from kvstore.transfer.memory.region import Exports, Region, RemoteRegion
from kvstore.transfer.memory.signal_safety import Shield
from kvstore.transfer.shm.target import CLOSED_COUNT, SharedTarget

MAGIC: Final = b"kvshm1 "
"""Metadata: this, the `socket_id` of the Unix socket, a space, its path."""
_TABLE_INDEX: Final = struct.Struct("<I")
"""A region's descriptor: its index in the owner's table of live regions."""
_WORD_BYTES: Final = 8
"""Size of the table's words. A memoryview reads one as an int in a third of numpy's time."""


class _PeerProcess:
    """A process of this host: its Unix socket, its table of live regions, and the mapped ones. `lock` guards all except
    `is_loaded`.
    """

    def __init__(self, host_id: str, path: str) -> None:
        self.host_id = host_id
        self.path = path
        self.lock = threading.Lock()
        self.channel: Channel | None = None
        self.live = memoryview(bytes(_WORD_BYTES * (CLOSED_COUNT + 1))).cast("Q")
        self.closed_count = 0
        """The table's count when it was last scanned."""
        self.mapped: dict[tuple[int, int, bool], tuple[MappedSlab, int]] = {}
        """By region id, key and whether writable: the mapping and the table index."""
        self.failed_ns = 0
        """Time of the last attempt that timed out."""
        self.is_loaded = True

    def is_live(self, region_id: int, index: int) -> bool:
        return index < len(self.live) and self.live[index] == region_id

    def unmap_closed(self) -> None:
        """Unmap regions that their owner has closed."""
        closed_count = self.live[CLOSED_COUNT]
        if closed_count != self.closed_count:
            self.closed_count = closed_count
            for key in [key for key, (_, index) in self.mapped.items() if not self.is_live(key[0], index)]:
                del self.mapped[key]

    def disconnect(self) -> None:
        """Unmap all regions and close the connection."""
        self.mapped.clear()
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def unload(self) -> None:
        """Disconnect for good."""
        self.is_loaded = False  # first: threads that wait for the lock must see it
        with self.lock:
            self.disconnect()


class SharedMemoryAgent(TransferAgent):
    """Agent of the transport `shm`. Reaches regions over shared memory (`Region.fd`), and only processes of the same
    user.

    If the owner closes a region during a request, the copy continues in memory that lives until the last mapping ends;
    the request then fails with StaleHandle.
    """

    transport = "shm"

    def __init__(
        self,
        name: str,
        rail: Rail,
        settings: TransferSettings,
        *,
        exports: Exports | None = None,
        run_dir: Path | None = None,
        listens: bool = True,
    ) -> None:
        super().__init__(name, rail)
        self._settings = settings
        self._target: SharedTarget | None = None
        if listens:
            self._target = SharedTarget(name, exports or Exports(), max_connections=settings.max_connections, run_dir=run_dir)
        self._threads = ThreadPoolExecutor(settings.copy_threads or min(4, os.cpu_count() or 1), thread_name_prefix="kvstore-shm-copy")
        self._lock = threading.Lock()
        self._queued: dict[AgentRequest, _PeerProcess] = {}
        """Submitted and not begun."""
        self._peers: list[_PeerProcess] = []
        self._is_closed = False

    def metadata(self) -> bytes:
        if self._target is None:
            return MAGIC + b" "
        return MAGIC + self._target.host_id.encode() + b" " + os.fsencode(self._target.path)

    def load_remote(self, metadata: bytes) -> Remote:
        host, _, path = metadata[len(MAGIC) :].partition(b" ")
        if not metadata.startswith(MAGIC) or not host or not path or len(metadata) > 300:
            raise ProtocolError("malformed metadata of a shared-memory agent")
        peer = _PeerProcess(host.decode("ascii", "replace"), os.fsdecode(path))
        if not is_local_socket(peer.path, peer.host_id):
            raise Unreachable("the peer's Unix socket is not reachable: it is on another host, or in another container")
        with self._lock:
            self._peers.append(peer)
        return peer

    def unload_remote(self, remote: Remote) -> None:
        peer = _as_process(remote)
        with self._lock:
            if peer in self._peers:
                self._peers.remove(peer)
            mine = [request for request, other in self._queued.items() if other is peer]
            for request in mine:
                del self._queued[request]
        for request in mine:
            request.finish(Unreachable("the peer was unloaded"))
        peer.is_loaded = False
        if submit_once(self._threads, peer.unload) is None:  # unmapping a pool is slow, and may wait for copies
            peer.unload()

    def export(self, region: Region) -> bytes | None:
        index = self._target.export(region) if self._target is not None else None
        return None if index is None else _TABLE_INDEX.pack(index)

    # --- requests ---

    def submit(self, request: AgentRequest) -> None:
        peer = _as_process(request.remote)
        try:
            check_pieces(request.pieces, is_read=request.direction is Direction.READ)
            request.deadline.left_s()
            request.state = time.monotonic_ns()
            with self._lock:
                if self._is_closed:
                    raise Closed("the agent is closed")
                if peer not in self._peers:
                    raise Unreachable("the peer was unloaded")
                self._queued[request] = peer
        except KVStoreError as error:
            request.finish(error)
            return
        if not request.caller_runs and submit_once(self._threads, partial(self.run, request)) is None:
            self.run(request)  # closed meanwhile, which ended the request; or no thread can be started

    def run(self, request: AgentRequest) -> None:
        with self._lock:
            peer = self._queued.pop(request, None)
        if peer is None:
            return
        error: KVStoreError | None = None
        try:
            self._copy(peer, request)
        except KVStoreError as failure:
            error = failure
        except BaseException:
            request.finish(Closed("the thread that copied was interrupted"))
            raise
        request.finish(error)

    def cancel(self, request: AgentRequest) -> None:
        with self._lock:
            was_queued = self._queued.pop(request, None) is not None
            request.is_cancelled = True
        if was_queued:
            request.finish(cancelled())

    def _copy(self, peer: _PeerProcess, request: AgentRequest) -> None:
        """Raises StaleHandle, Denied, InvalidArgument, Unreachable, DeadlineExceeded or Cancelled."""
        regions = remote_regions(request.pieces)
        mapped, indices = self._map_regions(peer, request, regions)
        local, remote = local_views(request.pieces), remote_views(request.pieces, mapped)
        destinations, sources = (local, remote) if request.direction is Direction.READ else (remote, local)
        for number, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
            if not number % 64 or len(source) >= 1 << 20:
                request.deadline.left_s()
                if request.is_cancelled:
                    raise cancelled()
            copy(destination, source)
        for region, index in zip(regions, indices, strict=True):
            if not peer.is_live(region.region_id, index):
                raise StaleHandle(f"region {region.region_id} was closed while it was copied")

    def _map_regions(
        self, peer: _PeerProcess, request: AgentRequest, regions: Iterable[RemoteRegion]
    ) -> tuple[dict[int, memoryview], list[int]]:
        """Return the mapped memory by the identity of the description, and the table indices."""
        writable = request.direction is Direction.WRITE
        mapped: dict[int, memoryview] = {}
        indices: list[int] = []
        _lock(peer, request.deadline)
        try:
            if peer.failed_ns >= request.state:  # failed while this request waited: consecutive timeouts would block all threads
                raise self._no_answer()
            channel = self._connected(peer, request.deadline)
            peer.unmap_closed()
            for region in regions:
                mapped[id(region)], index = self._find(peer, channel, region, writable, request.deadline)
                indices.append(index)
        finally:
            peer.lock.release()
        return mapped, indices

    def _connected(self, peer: _PeerProcess, deadline: Deadline) -> Channel:
        """Return a channel to the peer. Called with its lock held. Raises Closed, Unreachable or DeadlineExceeded."""
        if not peer.is_loaded:
            raise Closed("the agent is closed") if self._is_closed else Unreachable("the peer was unloaded")
        if peer.channel is None or not peer.channel.is_quiet():
            peer.disconnect()  # the process has ended; another may listen there
            self._connect(peer, deadline)
        assert peer.channel is not None
        return peer.channel

    def _connect(self, peer: _PeerProcess, deadline: Deadline) -> None:
        """Connect and map the table of live regions. A channel is kept only with its table, without which every region
        would look closed.
        """
        with self._attempt(peer, deadline) as attempt:
            channel = Channel.open(Address(unix=peer.path), Hello(ROLE_AGENT, name=self.name), attempt)
        try:
            if channel.welcome.host_id != peer.host_id:
                raise Unreachable(f"{peer.path} now belongs to another process, {channel.welcome.name!r}")
            table = self._map(peer, channel, Attach(0, 0), deadline).memory
            if len(table) % _WORD_BYTES:
                raise ProtocolError(f"the peer's table of live regions has {len(table)} bytes")
        except BaseException:
            channel.close()
            raise
        peer.channel, peer.live, peer.closed_count = channel, table.cast("Q"), 0

    def _find(
        self, peer: _PeerProcess, channel: Channel, remote: RemoteRegion, writable: bool, deadline: Deadline
    ) -> tuple[memoryview, int]:
        slab, index = peer.mapped.get((remote.region_id, remote.key, writable)) or self._attach(peer, channel, remote, writable, deadline)
        if not peer.is_live(remote.region_id, index):
            raise StaleHandle(f"region {remote.region_id} is closed")
        if remote.size_bytes > len(slab.memory):
            raise InvalidArgument(f"region {remote.region_id} has {len(slab.memory)} bytes, not {remote.size_bytes}")
        return slab.memory, index

    def _attach(
        self, peer: _PeerProcess, channel: Channel, remote: RemoteRegion, writable: bool, deadline: Deadline
    ) -> tuple[MappedSlab, int]:
        """Map a region. Called with the peer's lock held."""
        descriptor = remote.descriptors.get(self.transport, b"")
        if len(descriptor) != _TABLE_INDEX.size or not remote.region_id:
            raise InvalidArgument(f"region {remote.region_id} is not shared memory")
        slab = self._map(peer, channel, Attach(remote.region_id, remote.key, int(writable)), deadline)
        [index] = _TABLE_INDEX.unpack(descriptor)
        peer.mapped[remote.region_id, remote.key, writable] = slab, index
        return slab, index

    def _map(self, peer: _PeerProcess, channel: Channel, message: Attach, deadline: Deadline) -> MappedSlab:
        with self._attempt(peer, deadline) as attempt:
            answer, fds = channel.call_for_fds(message, attempt)
        if len(fds) != 1 or len(answer.sizes) != 1:
            for fd in fds:
                os.close(fd)
            raise ProtocolError(f"the peer sent {len(fds)} descriptors instead of one")
        try:
            return map_slab(fds[0], answer.sizes[0], writable=bool(message.writable))
        except Broken as error:
            raise Unreachable(str(error)) from None

    @contextmanager
    def _attempt(self, peer: _PeerProcess, deadline: Deadline) -> Iterator[Deadline]:
        """Limit one request to the peer, so that another transport can still be tried; a timeout is Unreachable. Called
        with the peer's lock held.
        """
        try:
            yield Deadline(min(deadline.left_s(), self._settings.connect_timeout_s))
        except DeadlineExceeded:
            deadline.left_s()
            peer.failed_ns = time.monotonic_ns()
            raise self._no_answer() from None
        except Unavailable as error:
            raise Unreachable(str(error)) from None

    def _no_answer(self) -> Unreachable:
        return Unreachable(f"the peer did not respond within {self._settings.connect_timeout_s:g} s")

    # --- notifications ---

    def notify(self, remote: Remote, message: bytes, deadline: Deadline) -> None:
        peer = _as_process(remote)
        if len(message) > MAX_NOTICE_BYTES:
            raise InvalidArgument(f"a notification is at most {MAX_NOTICE_BYTES} bytes long, not {len(message)}")
        with Shield():
            _lock(peer, deadline)
            try:
                self._connected(peer, deadline).call(Notice(message), Ok, deadline)
            except Unavailable as error:
                raise Unreachable(str(error)) from None
            finally:
                peer.lock.release()

    def notifications(self) -> list[tuple[str, bytes]]:
        return self._target.notices() if self._target is not None else []

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            queued, self._queued = list(self._queued), {}
            peers, self._peers = self._peers, []
        for request in queued:
            request.finish(Closed("the agent is closed"))
        self._threads.shutdown(wait=True)
        for peer in peers:
            peer.unload()
        if self._target is not None:
            self._target.close()


def _lock(peer: _PeerProcess, deadline: Deadline) -> None:
    """A function, not a context manager, which would cost a twentieth of a 4 KiB copy."""
    if not peer.lock.acquire(timeout=deadline.left_s()):
        raise deadline.exceeded()


def _as_process(remote: Remote) -> _PeerProcess:
    if not isinstance(remote, _PeerProcess):
        raise InvalidArgument("not a peer of this agent: pass what load_remote returned")
    return remote
