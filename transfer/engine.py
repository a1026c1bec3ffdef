"""The transfer engine: batches of copies between registered memory of this process and of its peers, over every path there is.

It knows memory, peers and transports. paths/batch.py checks what callers ask for and cuts it into slices. paths/slice_dispatcher.py sends
these, and failed ones elsewhere. Agents (agent.py) move the bytes.
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
from kvstore.transfer.memory.mapping import allocate
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
"""Characters; what peers accept."""
SECRET_BYTES: Final = 32
log = logging.getLogger("kvstore.transfer")


class TransferEngine:
    """See the module. Thread-safe. A context manager that closes it. In a forked child calls raise Forked and `close` does nothing.

    `name` is told to peers; it must be unique among them, and is made up if none is given. An engine that does not `serve` reads and
    writes peers' memory but shows none of its own.
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
        """`tls`: connections over TCP are TLS; None: they are not.

        Raises InvalidArgument for a name of more than MAX_NAME characters, and ConfigError: a transport or rail that the settings
        name is not there, an address is in use, or the system gives no thread."""
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
        """Held while peers, agents or the routes between them change; never while bytes move."""
        try:
            self._rails.open(self.topology)
        except BaseException:
            self.close()
            raise

    @property
    def agents(self) -> list[TransferAgent]:
        """One for each transport and rail, those of preferred transports first."""
        return self._rails.agents

    # --- memory ---

    def allocate(self, size_bytes: int) -> Region:
        """A region of fresh, zeroed shared memory, which peers of this host can map. It lasts until it is closed and no view is left.

        Raises InvalidArgument (no such size) or Full (the system has no memory left).
        """
        return allocate(size_bytes)

    def register(self, buffer: Any) -> Region:
        """A region over the caller's C-contiguous buffer, which must stay until `Region.close` has returned. Raises InvalidArgument."""
        return Region(flat(buffer))

    @shielded
    def export(self, region: Region, *, writable: bool = False) -> bytes:
        """Show a region to peers until it is closed. The result lets whoever has it read the region, and write it if `writable`."""
        self._check_process()
        if not self._serves:
            raise InvalidArgument("this engine serves no peers: make it with serves=True")
        key = region.write_key if writable else region.read_key
        return pack_region(RemoteRegion(region.region_id, region.size_bytes, key, self._rails.export(region), region.location))

    # --- peers ---

    def describe(self) -> bytes:
        """How peers reach this engine, for their `connect`. It changes with the links (`refresh`). With it goes the secret that lets them
        in: for those who may come, and nobody else."""
        agents = [AgentInfo(agent.transport, agent.rail, agent.metadata()) for agent in self.agents if self._serves]
        matrix = {place: (rails.preferred, rails.available) for place, rails in self.topology.matrix.items()}
        return pack_engine(EngineInfo(self.name, network_id(), tuple(agents), matrix, self._secret))

    @shielded
    def connect(self, description: bytes) -> Peer:
        """The peer that described itself so. Does no I/O; a peer that is known already gets its new description.

        Raises ProtocolError, or Unreachable when no transport is common to both.
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
                raise Unreachable(f"no way to {info.name}: this side has {', '.join(ours)}, that side {', '.join(theirs) or 'nothing'}")
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
        """A peer's region, as its `export` described it. Raises ProtocolError."""
        return PeerRegion(peer, unpack_region(description))

    @shielded
    def disconnect(self, peer: Peer) -> None:
        """Forget a peer: transfers under way to it fail with Unreachable, its connections are closed. A second time is a no-op."""
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
        """Disconnect the peers that have not been connected, nor read or written, for `peer_ttl_s`. For an owner who names them by their
        description each time, and is not told."""
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
        """The links have changed: use new rails, leave those that are gone. True if `describe` says something else now.

        What is under way on a rail that is gone is tried elsewhere. A new rail that cannot be used is logged, and tried again with the
        next change.
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
        """Our agents have changed; returns the routes that are no longer used."""
        try:
            routes = self._rails.routes(peer.info, peer)
        except KVStoreError as error:
            log.warning("a new way to %s cannot be used: %s", peer.name, error)
            routes = {path: route for path, route in peer.routes.items() if route.agent not in gone}
        with self._lock:
            return peer.set_routes(peer.info, routes)

    # --- moving ---

    def submit(
        self,
        batch: Batch,
        *,
        deadline_s: float | None = None,
        priority: Priority = Priority.FOREGROUND,
        on_done: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Begin a batch of copies and return at once. They may be made in any order, so they must not overlap.

        A transfer that nobody waits for meets its deadline when its slices are under way or their turn has come.
        `on_done` is called once with the transfer when it is over, in some thread: it must be short and must not block.
        Raises InvalidArgument (nothing is begun): a length or place outside its region, none or both ends a peer's, a read-only
        destination; Closed. What a signal handler raises meanwhile comes out once the transfer is over, which nobody else knows of.
        """
        if threading.get_ident() != threading.main_thread().ident:  # it sees no signals
            return begin_transfer(batch, self._dispatcher, self, deadline=self._deadline(deadline_s), priority=priority, on_done=on_done)
        transfer: Transfer | None = None
        gate = Gate()
        try:
            with Shield() as shield:
                deadline = self._deadline(deadline_s)
                transfer = begin_transfer(batch, self._dispatcher, self, deadline=deadline, priority=priority, on_done=on_done, gate=gate)
                if shield.raised is not None:
                    transfer.abandon()
        except BaseException:  # what a handler raised after that look too: nobody gets to know of the transfer
            try:
                if transfer is not None:
                    with contextlib.suppress(RuntimeError):  # no thread is to be had: it ends by its deadline
                        begin_thread(transfer.cancel)
            finally:
                gate.close_and_wait()
            raise
        return transfer

    def transfer(self, batch: Batch, *, deadline_s: float | None = None, priority: Priority = Priority.FOREGROUND) -> None:
        """Make a batch of copies and return when it is over. Raises as `submit` and `Transfer.wait`."""
        with Shield() as shield:
            transfer = begin_transfer(batch, self._dispatcher, self, deadline=self._deadline(deadline_s), priority=priority, waits=True)
            transfer.wait_with(shield)

    async def transfer_async(self, batch: Batch, *, deadline_s: float | None = None, priority: Priority = Priority.FOREGROUND) -> None:
        """As `transfer`, for a task. When the task is cancelled, the transfer is, and the task goes on once no byte of it moves."""
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
        except BaseException:  # a signal handler's, or the loop has ended: nobody comes back for it
            transfer.abandon()
            raise
        if cancellation is not None:
            raise cancellation
        transfer.check()

    # --- notifications, figures, the end ---

    def notify(self, peer: Peer, message: bytes, *, deadline_s: float | None = None) -> None:
        """Have `message` (at most 64 KiB) told by the peer's `notifications`, after all our transfers to it that are over by now.

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
            except (Unreachable, Closed):  # Closed: its rail has just gone
                if number == len(routes) - 1:
                    raise
        raise Unreachable(f"there is no way to {peer.name}")

    def notifications(self) -> list[tuple[str, bytes]]:
        """(name of the engine, message) of what peers have sent since the last call, in order for each peer."""
        found = self._target.notices()
        for agent in self.agents:
            found += agent.notifications()
        return found

    @property
    def served_bytes(self) -> int:
        """What peers have read from and written to this engine's memory by connections; what they map they copy unseen."""
        return self._target.served_bytes

    @property
    def served_connections(self) -> int:
        """Peers' connections now."""
        return self._target.connections

    def peers(self) -> list[Peer]:
        with self._lock:
            return list(self._peers.values())

    def rails(self) -> Mapping[tuple[str, str], RailCount]:
        """What this engine has moved since it was made, by transport and rail of this host."""
        with self._lock:
            return {name: replace(count) for name, count in self._dispatcher.rails.items()}

    def measured(self, name: str) -> MeasuredRate | None:
        """At what rate bytes went to and from the peer of that name while any did, by all paths together; None: it is not connected, or
        too little went."""
        with self._lock:
            peer = self._peers.get(name)
            return peer.chooser.bandwidth.measured() if peer is not None else None

    def _check_process(self) -> None:
        """Raises Forked: connections are the parent's, and threads were left behind."""
        if os.getpid() != self._process_id:
            raise Forked(f"this engine is that of process {self._process_id}, which process {os.getpid()} was forked from: make one here")

    def _deadline(self, deadline_s: float | None) -> Deadline:
        self._check_process()
        if deadline_s is None:
            deadline_s = self.settings.deadline_s
        if not abs(deadline_s) <= MAX_DEADLINE_S:  # nor is NaN
            raise InvalidArgument(f"a deadline is at most {MAX_DEADLINE_S:g} s away, not {deadline_s!r}")
        return Deadline(deadline_s)

    @shielded
    def close(self) -> None:
        """End every transfer with Closed, and let go of connections, threads and mappings. A second close is a no-op."""
        if os.getpid() != self._process_id:  # sockets, and what peers map, are the parent's too
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
