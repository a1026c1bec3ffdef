"""Server of the transport `shm`: passes region descriptors to processes of this host that present the regions' keys,
over a Unix socket.

Only processes of the same user can enter the socket's folder. Among them keys protect against mistakes, not malice: a
process with a read-only descriptor cannot map it for writing, but may reopen the memory through /proc, as it may trace
this process.

Peers also map a table of live regions, as a mapping alone would outlive its region unnoticed. The table is an array of
u64 in host byte order. Word 0 counts closed regions, so that a peer detects stale mappings with one read; each other
word is the id of an open region, or 0.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import threading
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import Closed, ConfigError, Full, ProtocolError, StaleHandle, Unavailable
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.node_messages import MapSlabsReply
from kvstore.protocol.session_messages import Hello, Ok, Welcome
from kvstore.protocol.transfers import SERVER_AGENT, Attach, Notice, ReadRegions, WriteRegions
from kvstore.rpc.address import socket_id
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.server import ConnectionLimits, Server, default_run_dir
from kvstore.rpc.server.session import Session
from kvstore.transfer.agent import Notices
from kvstore.transfer.memory.mapped_memory import map_slab
from kvstore.transfer.memory.region import Exports, Region

MAX_LIVE: Final = 65_535
"""Regions of one process shared at once; the table takes memory only where it is used."""
CLOSED_COUNT: Final = 0
"""Index of the counter word."""
F_SEAL_FUTURE_WRITE: Final = 0x10
"""Prevents new writable mappings, also by reopening. Linux 5.1; not in Python 3.11."""
log = logging.getLogger("kvstore.transfer")


class LiveRegions:
    """Owner's side of the table of live regions. Thread-safe. Owns the memfd `fd`, of `size_bytes`."""

    def __init__(self, max_regions: int = MAX_LIVE) -> None:
        """Raises Full: the system has no descriptor or memory left."""
        self.size_bytes = (max_regions + 1) * 8
        try:
            self.fd = os.memfd_create("kvstore-live", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise Full(f"no descriptor is left for the table of live regions: {error.strerror}") from None
        os.ftruncate(self.fd, self.size_bytes)
        self._table: npt.NDArray[np.uint64] = np.frombuffer(map_slab(os.dup(self.fd), self.size_bytes, writable=True).memory, np.uint64)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with contextlib.suppress(OSError):  # older kernels: peers are trusted not to write
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        self._max_regions = max_regions
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._next = CLOSED_COUNT + 1

    def add(self, region_id: int) -> int:
        """Return the region's new index in the table. Raises Full."""
        with self._lock:
            if not self._free and self._next > self._max_regions:
                raise Full(f"{self._max_regions} regions are shared already, the maximum: close some")
            index = self._free.pop() if self._free else self._next
            self._next = max(self._next, index + 1)
            self._table[index] = region_id
            return index

    def remove(self, index: int) -> None:
        """Mark a region as closed. No-op in a forked child, which shares the table with the owner."""
        if os.getpid() != self._process_id:
            return
        with self._lock:
            self._table[index] = 0
            self._table[CLOSED_COUNT] += 1
            self._free.append(index)

    def close(self) -> None:
        """Mark all regions as closed. A second close is a no-op."""
        with self._lock:
            if self.fd >= 0:
                self._table[CLOSED_COUNT + 1 : self._next] = 0
                self._table[CLOSED_COUNT] += 1
                os.close(self.fd)
                self.fd = -1


class SharedTarget:
    """Server thread of one Unix socket. `export`, `notices` and `close` are thread-safe."""

    def __init__(
        self, name: str, exports: Exports, *, max_connections: int, max_regions: int = MAX_LIVE, run_dir: Path | None = None
    ) -> None:
        """Raises ConfigError if the socket cannot be created in `run_dir` (default: the daemons'), Full if out of
        descriptors.
        """
        self._name = name
        self._exports = exports
        self._live = LiveRegions(max_regions)
        self._indices: dict[int, int] = {}
        self._lock = threading.Lock()
        self._notices = Notices(name)
        self._is_closed = False
        self._reactor = Reactor()
        self._server = Server(self._reactor, self, ConnectionLimits(max_connections))
        path = (run_dir or default_run_dir()) / f"transfer-{os.getpid()}-{secrets.token_hex(4)}.sock"
        try:
            self.path = self._server.listen_unix(path)
        except ConfigError:
            self._server.close()
            self._reactor.close()
            self._live.close()
            raise
        self.host_id = socket_id(self.path)
        self._thread = threading.Thread(target=self._reactor.run, name="kvstore-shm", daemon=True)
        self._thread.start()

    def export(self, region: Region) -> int | None:
        """Return the region's index in the table of live regions; None if it is not shared memory. Raises Closed, or
        Full.
        """
        if region.fd < 0:
            return None
        region.hold()  # its close waits for this
        try:
            with self._lock:
                if self._is_closed:
                    raise Closed("the agent is closed")
                index = self._indices.get(region.region_id)
                if index is None:
                    index = self._indices[region.region_id] = self._live.add(region.region_id)
                    self._exports.add(region)
                    region.on_close(self._forget)
        finally:
            region.release()
        return index

    def _forget(self, region: Region) -> None:
        with self._lock:
            if not self._is_closed:
                self._live.remove(self._indices.pop(region.region_id))

    def notices(self) -> list[tuple[str, bytes]]:
        """Remove and return the notifications, as (name of the agent, message)."""
        return self._notices.take()

    def close(self) -> None:
        """Close all regions to peers. A second close is a no-op."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._reactor.stop()
            self._thread.join()
            self._server.close()
            self._reactor.close()
            self._live.close()  # last: peers must see the process disconnect, not closed regions

    # --- handler of the server's sessions ---

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        if header.type == Hello.TYPE:
            session.context = Hello.unpack(body).name
            session.reply(header.request_id, Welcome(SERVER_AGENT, self._name, host_id=self.host_id, unix=self.path))
        elif session.context is None:
            raise ProtocolError("a connection begins with Hello")
        elif header.type == Attach.TYPE:
            self._attach(session, header, Attach.unpack(body))
        elif header.type == Notice.TYPE:
            self._notices.put(session.context, Notice.unpack(body).message)
            session.reply(header.request_id, Ok())
        else:
            raise ProtocolError(f"shared memory takes no message of type {header.type}")

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> list[memoryview] | None:
        raise ProtocolError(f"a message of type {header.type} has no payload")

    def closed(self, session: Session) -> None:
        """No-op: peers keep their mappings, and no state is kept for them here."""

    def _attach(self, session: Session, header: FrameHeader, message: Attach) -> None:
        if not message.region:
            self._send_descriptor(session, header, self._live.fd, self._live.size_bytes, writable=False)
            return
        request = (WriteRegions if message.writable else ReadRegions)([message.region], [message.key], [0], [0])
        _, [region] = self._exports.hold(request)  # after its close the descriptor number may be reused
        try:
            if region.fd < 0:
                raise StaleHandle(f"region {message.region} is not shared memory")
            self._send_descriptor(session, header, region.fd, region.size_bytes, writable=bool(message.writable))
        finally:
            region.release()

    def _send_descriptor(self, session: Session, header: FrameHeader, fd: int, size_bytes: int, *, writable: bool) -> None:
        try:
            # Reopen instead of dup: a description opened read-only cannot be mapped for writing.
            copy = os.open(f"/proc/self/fd/{fd}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"no descriptor of this memory can be opened: {error.strerror}") from None
        session.reply(header.request_id, MapSlabsReply([size_bytes]), fds=[copy], on_sent=lambda: os.close(copy))
