"""Transfer engine: batches of copies between registered memory of this process and of its peers, over all available
paths.

Holds memory, peers and transports. paths/batch.py validates batches and cuts them into slices.
paths/slice_dispatcher.py assigns slices to paths and retries failed ones. Agents (agent.py) move the bytes.
"""

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvstore.protocol.errors import Closed, Forked, InvalidArgument, KVStoreError, Unreachable
from kvstore.rpc.address import network_id
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls.certificates import Certificates
from kvstore.transfer.agent import TransferAgent
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.description import AgentInfo, EngineInfo, pack_engine, pack_region, unpack_engine, unpack_region
from kvstore.transfer.memory.mapped_memory import allocate
from kvstore.transfer.memory.region import Exports, Region, RemoteRegion
from kvstore.transfer.memory.signal_safety import Gate, Shield, begin_thread, shielded
from kvstore.transfer.paths.batch import Batch, begin_transfer, flat
from kvstore.transfer.paths.path_chooser import MeasuredRate
from kvstore.transfer.paths.peer import PathRoute, Peer, PeerRegion, unload
from kvstore.transfer.paths.rails import AgentFactory, RailAgents
from kvstore.transfer.paths.slice_dispatcher import RailCount, SliceDispatcher
from kvstore.transfer.paths.transfers import Priority, Transfer
from kvstore.transfer.streams.target import Target
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.model import Topology

MAX_DEADLINE_S: Final = 86_400.0
MAX_NAME: Final = 255
"""Characters, as peers accept them."""
SECRET_BYTES: Final = 32
log = logging.getLogger("kvstore.transfer")


class TransferEngine:
    """Reads and writes memory of peers, and serves its own. Thread-safe; a context manager that closes it.

    `name` must be unique among peers; generated if empty. An engine with `serves=False` exports no memory. In a forked
    child, calls raise Forked and `close` does nothing.
    """

    def __init__(
        self,
        name: str = "",
        settings: TransferSettings | None = None,
        *,
        topology: Topology | None = None,
        serves: bool = True,
        tls: Certificates | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Start the engine. With `tls`, connections over TCP are encrypted.

        Raises InvalidArgument for a name longer than MAX_NAME, and ConfigError: a configured transport or rail does not
        exist, an address is in use, or no thread can be started.
        """
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        if len(self.name) > MAX_NAME:
            raise InvalidArgument(f"an engine's name has at most {MAX_NAME} characters, not {len(self.name)}")
        self._process_id = os.getpid()
        self.settings = settings or TransferSettings()
        self.topology = topology or Discovery.configured(self.settings).read_topology()
        self._clock_ns = clock_ns
        self._dispatcher = SliceDispatcher(self.settings, clock_ns)
        self._lock = self._dispatcher.lock
        self._exports = Exports()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._target = Target(self.name, self._exports, self.settings, self._secret)
        self._serves = serves
        encrypted = tls if tls is not None and tls.connects else None
        self._rails = RailAgents(AgentFactory(self.name, self.settings, self._exports, self._target, listens=serves, tls=encrypted))
        self._peers: dict[str, Peer] = {}
        self._random = random.Random(secrets.randbits(64))
        self._changing = threading.Lock()
        """Held while peers, agents or routes change, never during transfers."""
        try:
            self._rails.open(self.topology)
        except BaseException:
            self.close()
            raise

    @property
    def agents(self) -> list[TransferAgent]:
        """One per transport and rail, preferred transports first."""
        return self._rails.agents

    # --- memory ---

    def allocate(self, size_bytes: int) -> Region:
        """Return a region of zeroed shared memory, which peers of this host can map. It lives until it is closed and no
        view is left.

        Raises InvalidArgument (size out of range) or Full (the system has no memory left).
        """
        return allocate(size_bytes)

    def register(self, buffer: Any) -> Region:
        """Return a region over the caller's C-contiguous buffer, which must exist until `Region.close` returns. Raises
        InvalidArgument.
        """
        return Region(flat(buffer))

    @shielded
    def export(self, region: Region, *, writable: bool = False) -> bytes:
        """Make a region accessible to peers until it is closed. Any holder of the returned bytes may read it, and write
        it if `writable`.
        """
        self._check_process()
        if not self._serves:
            raise InvalidArgument("this engine serves no peers: make it with serves=True")
        key = region.write_key if writable else region.read_key
        return pack_region(RemoteRegion(region.region_id, region.size_bytes, key, self._rails.export(region), region.location))

    # --- peers ---

    def describe(self) -> bytes:
        """Return how peers reach this engine, for their `connect`. Changes with the links (`refresh`).

        Contains the secret that authenticates peers: distribute it to authorised peers only.
        """
        agents = [AgentInfo(agent.transport, agent.rail, agent.metadata()) for agent in self.agents if self._serves]
        matrix = {place: (rails.preferred, rails.available) for place, rails in self.topology.matrix.items()}
        return pack_engine(EngineInfo(self.name, network_id(), tuple(agents), matrix, self._secret))

    @shielded
    def connect(self, description: bytes) -> Peer:
        """Return the peer with this description, updating a known one. Does no I/O.

        Raises ProtocolError, or Unreachable if both sides have no transport in common.
        """
        self._check_process()
        info = unpack_engine(description)
        with self._changing:
            if self._dispatcher.is_closed:
                raise Closed("the engine is closed")
            peer = self._peers.get(info.name)
            if peer is not None and peer.info == info:
                peer.used_ns = self._clock_ns()
                return peer
            routes = self._rails.routes(info, peer)
            if not routes:
                ours = sorted({agent.transport for agent in self.agents})
                theirs = sorted({agent.transport for agent in info.agents})
                raise Unreachable(
                    f"no common transport with {info.name}: this side has {', '.join(ours)}, that side {', '.join(theirs) or 'nothing'}"
                )
            if peer is None:
                peer = Peer(info, self.settings, self._random, self._preferred_rails, owner=self)
            with self._lock:
                gone = peer.set_routes(info, routes)
                peer.used_ns = self._clock_ns()
                self._peers[info.name] = peer
        unload(gone)
        return peer

    def _preferred_rails(self, location: str) -> Collection[str]:
        return self.topology.preferred(location).preferred

    def import_region(self, peer: Peer, description: bytes) -> PeerRegion:
        """Return a peer's region from its `export`ed description. Raises ProtocolError."""
        return PeerRegion(peer, unpack_region(description))

    @shielded
    def disconnect(self, peer: Peer) -> None:
        """Forget a peer: its transfers fail with Unreachable, its connections are closed. A second call is a no-op."""
        self._check_process()
        with self._changing:
            if self._peers.get(peer.name) is not peer:
                return
            with self._lock:
                del self._peers[peer.name]
        self._dispatcher.end(peer, Unreachable(f"{peer.name} was disconnected"))
        unload(list(peer.routes.values()))

    @shielded
    def forget_idle(self) -> None:
        """Disconnect peers that were neither connected, read nor written for `peer_ttl_s`. For owners that pass a
        peer's description each time and are not notified when a peer is removed.
        """
        self._check_process()
        since_ns = self._clock_ns() - int(self.settings.peer_ttl_s * 1e9)
        with self._changing, self._lock:
            idle = [peer for peer in self._peers.values() if peer.is_idle(since_ns)]
            for peer in idle:
                del self._peers[peer.name]
                peer.close()
        unload([route for peer in idle for route in peer.routes.values()])

    @shielded
    def refresh(self, topology: Topology) -> bool:
        """Adapt to changed links: add agents on new rails, remove those of rails that are gone. Returns whether
        `describe` changed.

        Slices in flight on a removed rail are retried elsewhere. A new rail that cannot be used is logged and retried
        at the next change.
        """
        self._check_process()
        with self._changing:
            if self._dispatcher.is_closed:
                return False
            gone, has_fresh = self._rails.change(topology)
            if not gone and not has_fresh and topology.matrix == self.topology.matrix:
                return False
            self.topology = topology
            unused = [route for peer in self.peers() for route in self._reroute(peer, gone)]
        unload([route for route in unused if route.agent not in gone])
        for agent in gone:
            agent.close()
        return True

    def _reroute(self, peer: Peer, gone: Sequence[TransferAgent]) -> list[PathRoute]:
        """Recompute a peer's routes after a change of agents; returns the routes that are no longer used."""
        try:
            routes = self._rails.routes(peer.info, peer)
        except KVStoreError as error:
            log.warning("a new route to %s cannot be used: %s", peer.name, error)
            routes = {path: route for path, route in peer.routes.items() if route.agent not in gone}
        with self._lock:
            return peer.set_routes(peer.info, routes)

    # --- transfers ---

    def submit(
        self,
        batch: Batch,
        *,
        deadline_s: float | None = None,
        priority: Priority = Priority.FOREGROUND,
        on_done: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Begin a batch of copies and return at once. They may be executed in any order, so they must not overlap.

        `on_done` is called once with the transfer when it is over, in any thread: it must be short and must not block.
        Without a waiter, a deadline is checked when slices are in flight or are dispatched.

        Raises InvalidArgument (nothing has begun): a range outside its region, not exactly one end at a peer, a
        read-only destination; Closed. An exception of a signal handler during the call is raised after the transfer is
        over, as the caller has no handle of it.
        """
        if threading.get_ident() != threading.main_thread().ident:  # receives no signals
            return begin_transfer(batch, self._dispatcher, self, deadline=self._deadline(deadline_s), priority=priority, on_done=on_done)
        transfer: Transfer | None = None
        gate = Gate()
        try:
            with Shield() as shield:
                deadline = self._deadline(deadline_s)
                transfer = begin_transfer(batch, self._dispatcher, self, deadline=deadline, priority=priority, on_done=on_done, gate=gate)
                if shield.raised is not None:
                    transfer.abandon()
        except BaseException:  # also what a handler raised after that check: the caller gets no transfer
            try:
                if transfer is not None:
                    with contextlib.suppress(RuntimeError):  # no thread can be started: it ends by its deadline
                        begin_thread(transfer.cancel)
            finally:
                gate.close_and_wait()
            raise
        return transfer

    def transfer(self, batch: Batch, *, deadline_s: float | None = None, priority: Priority = Priority.FOREGROUND) -> None:
        """Execute a batch of copies. Raises as `submit` and `Transfer.wait`."""
        with Shield() as shield:
            transfer = begin_transfer(batch, self._dispatcher, self, deadline=self._deadline(deadline_s), priority=priority, waits=True)
            transfer.wait_with(shield)

    async def transfer_async(self, batch: Batch, *, deadline_s: float | None = None, priority: Priority = Priority.FOREGROUND) -> None:
        """As `transfer`, for a task. Cancelling the task cancels the transfer; the task continues once no byte of it
        moves.
        """
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        transfer = self.submit(batch, deadline_s=deadline_s, priority=priority, on_done=lambda _: _wake(loop, over))
        cancellation: asyncio.CancelledError | None = None
        try:
            timer = loop.call_at(loop.time() + (transfer.deadline.at_ns - time.monotonic_ns()) / 1e9, transfer.expire)
            while not over.done():
                try:
                    await asyncio.shield(over)
                except asyncio.CancelledError as error:
                    cancellation = error
                    transfer.cancel()
            timer.cancel()
        except BaseException:  # of a signal handler, or the loop has ended: no task waits for it
            transfer.abandon()
            raise
        if cancellation is not None:
            raise cancellation
        transfer.check()

    # --- notifications, statistics, close ---

    def notify(self, peer: Peer, message: bytes, *, deadline_s: float | None = None) -> None:
        """Deliver `message` (at most 64 KiB) to the peer's `notifications`, after all of our transfers to it that are
        over by now.

        Raises Unreachable when no path works, DeadlineExceeded, InvalidArgument.
        """
        deadline = self._deadline(deadline_s)
        with self._lock:
            routes = sorted(
                peer.routes.items(), key=lambda item: (item[1].facts.preference, peer.chooser.states[item[0]].cooldown_until_ns)
            )
        if not peer.is_connected:
            raise Unreachable(f"{peer.name} was disconnected")
        for number, (_, route) in enumerate(routes):
            try:
                route.agent.notify(route.remote, message, deadline)
                return
            except (Unreachable, Closed):  # Closed: its rail was just removed
                if number == len(routes) - 1:
                    raise
        raise Unreachable(f"no path to {peer.name} exists")

    def notifications(self) -> list[tuple[str, bytes]]:
        """Remove and return the notifications received, as (name of the engine, message), in order per peer."""
        found = self._target.notices()
        for agent in self.agents:
            found += agent.notifications()
        return found

    @property
    def served_bytes(self) -> int:
        """Bytes that peers read and wrote over connections. Copies through mappings are not counted."""
        return self._target.served_bytes

    @property
    def served_connections(self) -> int:
        """Open connections from peers."""
        return self._target.connections

    def peers(self) -> list[Peer]:
        with self._lock:
            return list(self._peers.values())

    def rails(self) -> Mapping[tuple[str, str], RailCount]:
        """Return the bytes and slices moved since the engine was made, by transport and local rail."""
        with self._lock:
            return {name: replace(count) for name, count in self._dispatcher.rails.items()}

    def measured(self, name: str) -> MeasuredRate | None:
        """Return the measured rate to and from the named peer over all paths, or None if it is not connected or too few
        bytes moved.
        """
        with self._lock:
            peer = self._peers.get(name)
            return peer.chooser.bandwidth.measured() if peer is not None else None

    def _check_process(self) -> None:
        """Raises Forked: connections and threads belong to the parent."""
        if os.getpid() != self._process_id:
            raise Forked(
                f"this engine is that of process {self._process_id}, which process {os.getpid()} was forked from: make a new engine here"
            )

    def _deadline(self, deadline_s: float | None) -> Deadline:
        self._check_process()
        if deadline_s is None:
            deadline_s = self.settings.deadline_s
        if not abs(deadline_s) <= MAX_DEADLINE_S:  # also false for NaN
            raise InvalidArgument(f"a deadline is at most {MAX_DEADLINE_S:g} s away, not {deadline_s!r}")
        return Deadline(deadline_s)

    @shielded
    def close(self) -> None:
        """Fail all transfers with Closed, and close connections, threads and mappings. A second close is a no-op."""
        if os.getpid() != self._process_id:  # sockets and mappings are shared with the parent
            return
        with self._changing, self._lock:
            if self._dispatcher.is_closed:
                return
            self._dispatcher.is_closed = True
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            self._dispatcher.end(peer, Closed("the engine is closed"))
        try:
            self._rails.close()
        finally:
            self._target.close()

    def __enter__(self) -> "TransferEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _wake(loop: asyncio.AbstractEventLoop, over: "asyncio.Future[None]") -> None:
    loop.call_soon_threadsafe(over.set_result, None)
