"""TransferAgent over NIXL: one-sided reads and writes of registered memory, by RDMA where available.

It has two native agents. The *server* holds exported regions for the agent's life. The *initiator* executes requests
and is discarded whenever one of them must be abandoned: NIXL can request a cancellation, but bytes may still arrive.
Peers know only the server, so they are not affected; other requests in flight fail with Unreachable and may be retried.

Limits of NIXL: the owner's side checks no keys and does not see reads, so a peer is trusted with what was exported to
it. Keys are checked on the initiating side, against mistakes, not attacks.
"""

import atexit
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from kvstore.protocol.errors import Closed, InvalidArgument, KVStoreError, StaleHandle, Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import AgentRequest, Rail, TransferAgent, cancelled
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.pieces import local_regions
from kvstore.transfer.memory.region import Region
from kvstore.transfer.nixl.descriptors import (
    TRANSPORT,
    ExportedRegion,
    NixlRemote,
    Rows,
    descriptor_rows,
    pack_metadata,
    pack_region,
    unpack_metadata,
)
from kvstore.transfer.nixl.library import NativeAgent, NixlProgress

MAX_KNOWN_REGIONS: Final = 4096
"""Regions loaded per peer. NIXL keeps them until the peer is forgotten, and a slot written from another host is a
region for the time of its put. Beyond this number the peer is forgotten, and the regions in use are loaded again.
"""
MAX_MESSAGE_BYTES: Final = 64 << 10
POLLS_BEFORE_SLEEP: Final = 8
"""Polls of a caller that runs its request before it sleeps: a small transfer takes less than the shortest sleep, about
70 us.
"""
FIRST_PAUSE_S: Final = 20e-6
LONGEST_PAUSE_S: Final = 1e-3
"""Bounds of the pause between polls: NIXL does not notify of completion. Its own thread makes progress in between."""

_open_agents: "weakref.WeakSet[NixlAgent]" = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Close all agents at interpreter exit, before NIXL's threads outlive the memory that they move."""
    for agent in list(_open_agents):
        agent.close()


@dataclass(slots=True, eq=False)
class _NixlTransfer:
    """A request in flight."""

    request: AgentRequest
    peer: NixlRemote
    handle: int
    is_caller_polling: bool
    """The caller polls it; the agent's thread need not."""
    give_up_at_ns: int
    """Its deadline, or an earlier time once it has been cancelled."""


class NixlAgent(TransferAgent):
    """Agent of the transport `nixl`. A cancelled request may end within the stall timeout before the initiator is
    discarded for it.
    """

    transport = TRANSPORT

    def __init__(self, name: str, rail: Rail, settings: TransferSettings) -> None:
        """Raises ConfigError: no NIXL library, or no such device."""
        super().__init__(name, rail)
        self._grace_ns = int(settings.stall_timeout_s * 1e9)
        self._server = self._make_native()
        self._initiator: NativeAgent | None = None
        self._registered: dict[NativeAgent, set[int]] = {self._server: set()}
        self._watched: set[int] = set()
        """Regions whose close notifies this agent."""
        self._known: dict[str, set[int]] = {}
        """Servers of peers that the initiator has loaded, and the ids of their loaded regions."""
        self._in_flight: dict[int, _NixlTransfer] = {}
        self._completed: list[tuple[AgentRequest, KVStoreError | None]] = []
        """Requests to finish after the lock is released: callbacks may call this agent."""
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._is_closed = False
        _open_agents.add(self)

    def metadata(self) -> bytes:
        with self._locked():
            return pack_metadata(NixlRemote(self.name, self._server.name, self._server.describe()))

    def load_remote(self, metadata: bytes) -> NixlRemote:
        return unpack_metadata(metadata)

    def unload_remote(self, remote: NixlRemote) -> None:
        with self._locked():
            if any(transfer.peer.server == remote.server for transfer in self._in_flight.values()):
                self._give_up_initiator(Unreachable(f"{remote.name} was unloaded"))
            else:
                self._forget(remote)

    def export(self, region: Region) -> bytes:
        """Raises Closed; ConfigError if the region cannot be registered."""
        region.hold()
        try:
            with self._locked():
                self._register(self._server, region)
                return pack_region(region, self._server.name, self._server.describe(region))
        finally:
            region.release()

    def submit(self, request: AgentRequest) -> None:
        try:
            request.deadline.left_s()
            exported, local, remote = descriptor_rows(request.direction, request.pieces)
            with self._locked():
                if len(local):
                    self._begin(request, exported, local, remote)
                else:
                    self._completed.append((request, None))
        except KVStoreError as error:
            request.finish(error)

    def run(self, request: AgentRequest) -> None:
        transfer: _NixlTransfer | None = request.state
        if transfer is None:
            return
        transfer.is_caller_polling = True
        polls, pause_s = 0, FIRST_PAUSE_S
        try:
            while not request.is_over:
                self._poll((transfer,))
                polls += 1
                if polls >= POLLS_BEFORE_SLEEP and not request.is_over:
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            if not request.is_over:
                self._hand_to_thread(transfer)

    def cancel(self, request: AgentRequest) -> None:
        """End the request within the stall timeout, by discarding the initiator if necessary."""
        transfer: _NixlTransfer | None = request.state
        if transfer is not None:
            request.is_cancelled = True
            transfer.give_up_at_ns = min(transfer.give_up_at_ns, time.monotonic_ns() + self._grace_ns)
            self._hand_to_thread(transfer)

    def notify(self, remote: NixlRemote, message: bytes, deadline: Deadline) -> None:
        """Raises InvalidArgument (too long), Unreachable, DeadlineExceeded, Closed. Lost if the peer dies now."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise InvalidArgument(f"a notification of {len(message)} bytes is longer than {MAX_MESSAGE_BYTES}")
        deadline.left_s()
        with self._locked():
            initiator = self._load_peer(remote, ())
            try:
                initiator.notify(remote.server, message)
            except Unreachable:
                if not any(transfer.peer.server == remote.server for transfer in self._in_flight.values()):
                    self._forget(remote)
                raise

    def notifications(self) -> list[tuple[str, bytes]]:
        with self._locked():
            found = self._server.notifications()
        return [(sender.rpartition("@")[0], message) for sender, messages in found.items() for message in messages]

    def close(self) -> None:
        with suppress(Closed), self._locked():
            self._is_closed = True
            self._give_up_initiator(Closed(f"the agent {self.name} was closed"))
            self._registered.clear()
            self._server.close()
            self._work.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, then finish the requests in `_completed`. Raises Closed."""
        over: list[tuple[AgentRequest, KVStoreError | None]] = []
        try:
            with self._lock:
                if self._is_closed:
                    raise Closed(f"the agent {self.name} is closed")
                try:
                    yield
                finally:
                    over, self._completed = self._completed, over
        finally:
            for request, error in over:
                request.finish(error)

    def _make_native(self) -> NativeAgent:
        # Unique even if the process was started again under its name: NIXL knows peers by name alone.
        return NativeAgent(f"{self.name}@{secrets.token_hex(6)}", self.rail)

    def _register(self, native: NativeAgent, region: Region) -> None:
        if region.region_id in self._registered[native]:
            return
        native.register(region)
        self._registered[native].add(region.region_id)
        if region.region_id not in self._watched:
            self._watched.add(region.region_id)
            itself = weakref.ref(self)  # the region may outlive this agent by far
            region.on_close(lambda closed: agent._deregister(closed) if (agent := itself()) is not None else None)

    def _deregister(self, region: Region) -> None:
        with self._lock:
            self._watched.discard(region.region_id)
            for native, registered in self._registered.items():
                if region.region_id in registered:
                    registered.remove(region.region_id)
                    native.deregister(region)

    def _load_peer(self, remote: NixlRemote, exported: Iterable[ExportedRegion]) -> NativeAgent:
        """Return the initiator with this peer and these regions loaded. Raises Unreachable, ProtocolError, StaleHandle,
        ConfigError.
        """
        if any(region.server != remote.server.encode() for region in exported):
            raise StaleHandle(f"a region was exported by another agent than {remote.name} is now")
        if self._initiator is None:
            self._initiator = self._make_native()
            self._registered[self._initiator] = set()
        initiator = self._initiator
        is_idle = not any(transfer.peer.server == remote.server for transfer in self._in_flight.values())
        if is_idle and len(self._known.get(remote.server, ())) >= MAX_KNOWN_REGIONS:
            self._forget(remote)
        if remote.server not in self._known:
            initiator.load(remote.description)
            self._known[remote.server] = set()
        try:
            for region in exported:
                if region.region_id not in self._known[remote.server]:
                    initiator.load(region.description)
                    self._known[remote.server].add(region.region_id)
        except KVStoreError:
            # NIXL has dropped what it knew of the peer, but not its connection, and would refuse the peer from now on.
            self._give_up_initiator(_collateral_error(remote))
            raise
        return initiator

    def _forget(self, remote: NixlRemote) -> None:
        if self._known.pop(remote.server, None) is not None and self._initiator is not None:
            self._initiator.forget(remote.server)

    def _begin(self, request: AgentRequest, exported: Sequence[ExportedRegion], local: Rows, remote: Rows) -> None:
        if not request.caller_runs:
            self._ensure_thread()  # before any byte moves
        initiator = self._load_peer(request.remote, exported)
        for region in local_regions(request.pieces):
            self._register(initiator, region)
        handle = initiator.prepare(request.direction, local, remote, request.remote.server)
        transfer = _NixlTransfer(request, request.remote, handle, request.caller_runs, request.deadline.at_ns)
        request.state = self._in_flight[handle] = transfer
        self._settle(transfer, initiator.post(handle))
        if not transfer.is_caller_polling and self._in_flight:
            self._work.notify()

    def _poll(self, transfers: Iterable[_NixlTransfer]) -> None:
        with suppress(Closed), self._locked():
            for transfer in transfers:
                # NIXL reuses handles: the handle alone does not identify a transfer.
                if self._in_flight.get(transfer.handle) is transfer and self._initiator is not None:
                    self._settle(transfer, self._initiator.progress(transfer.handle))

    def _settle(self, transfer: _NixlTransfer, progress: NixlProgress) -> None:
        """Act on a transfer's progress: end it, and others that fail with it."""
        request, peer = transfer.request, transfer.peer
        if progress is NixlProgress.DONE:
            self._end(transfer, None)
        elif progress is NixlProgress.DISCONNECTED:
            self._known.pop(peer.server, None)
            for other in [other for other in self._in_flight.values() if other.peer.server == peer.server]:
                self._end(other, Unreachable(f"the connection to {peer.name} broke"))
        elif progress is NixlProgress.FAILED:
            self._end(transfer, Unreachable(f"NIXL failed in a transfer with {peer.name}"))
            self._give_up_initiator(_collateral_error(peer))
        elif time.monotonic_ns() >= transfer.give_up_at_ns:
            self._end(transfer, cancelled() if request.is_cancelled else request.deadline.exceeded())
            self._give_up_initiator(_collateral_error(peer))

    def _end(self, transfer: _NixlTransfer, error: KVStoreError | None) -> None:
        """End a transfer. Unless it moves no byte any more, the initiator must be discarded next."""
        assert self._initiator is not None
        self._initiator.release(transfer.handle)
        del self._in_flight[transfer.handle]
        transfer.request.state = None
        self._completed.append((transfer.request, error))

    def _give_up_initiator(self, error: KVStoreError) -> None:
        """Discard the initiator: requests in flight fail with this error. The next request makes another one."""
        for transfer in list(self._in_flight.values()):
            self._end(transfer, error)
        self._known.clear()
        if self._initiator is not None:
            del self._registered[self._initiator]
            self._initiator.close()
            self._initiator = None

    def _hand_to_thread(self, transfer: _NixlTransfer) -> None:
        with suppress(Closed), self._locked():
            transfer.is_caller_polling = False
            try:
                self._ensure_thread()
            except Unreachable:  # its completion would never be polled
                self._give_up_initiator(_collateral_error(transfer.peer))
            self._work.notify()

    def _ensure_thread(self) -> None:
        """Start the polling thread. Raises Unreachable if that fails."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"nixl-{self.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise Unreachable(f"no thread can be started to poll NIXL's transfers: {error}") from None
            self._thread = thread

    def _unpolled(self) -> list[_NixlTransfer]:
        return [transfer for transfer in self._in_flight.values() if not transfer.is_caller_polling]

    def _run(self) -> None:
        """Polling thread: polls the requests that no caller polls."""
        pause_s = FIRST_PAUSE_S
        while True:
            with self._lock:
                while not self._is_closed and not self._unpolled():
                    self._work.wait()
                    pause_s = FIRST_PAUSE_S
                if self._is_closed:
                    return
                transfers = self._unpolled()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self._poll(transfers)


def _collateral_error(peer: NixlRemote) -> Unreachable:
    return Unreachable(f"all transfers of this agent were aborted together with one to {peer.name}: retry")
