"""A transfer agent between engines of one process that fails, delays and stalls as scripted by a test: the faults are at the interface.

Name it in settings as `tests.transfer.faulty:FaultyAgent`, and SpareAgent for a second transport.
"""

import itertools
import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvstore.protocol.errors import Closed, Denied, KVStoreError, ProtocolError, StaleHandle, Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import AgentRequest, Direction, Rail, TransferAgent, cancelled
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Piece, Region
from kvstore.transfer.topology.model import Nic, NumaNode, Topology

FAULTY = "tests.transfer.faulty:FaultyAgent"
SPARE = "tests.transfer.faulty:SpareAgent"


_numbers = itertools.count()
"""Of agents: one that takes another's place describes itself otherwise."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Scripted result of a request: `moved_bytes` of it move (None: all), then it ends with `error`; or it `waits` for the test."""

    error: KVStoreError | None = None
    moved_bytes: int | None = None
    waits: bool = False


DELIVER = Answer()
WAIT = Answer(waits=True)


@dataclass(eq=False, slots=True)
class FaultyRemote:
    """A peer's agent, by the name of its engine and its rail."""

    name: str
    device: str
    is_loaded: bool = True


class FaultyAgent(TransferAgent):
    """Copies in the calling thread, unless `answers` (for the next requests) or `default` (after those) script another result.

    `ignores_cancel` makes it an agent that cannot cancel. `peak` is the most requests that one peer had under way. `begun` lists the
    requests in the order in which they came.
    """

    transport = "faulty"
    window = 2
    honours_fences = True
    living: ClassVar[dict[tuple[str, str, str], "FaultyAgent"]] = {}
    """By transport, engine and device."""
    exported: ClassVar[dict[tuple[str, int], Region]] = {}
    """By transport and id, which no two regions of the process share."""

    def __init__(self, name: str, rail: Rail) -> None:
        super().__init__(name, rail)
        self.answers: deque[Answer] = deque()
        self.default = DELIVER
        self.ignores_cancel = self.has_ignored_a_cancel = False
        self.before_submit: Callable[[AgentRequest], None] | None = None
        self.under_way: list[AgentRequest] = []
        self.begun: list[AgentRequest] = []
        self.loaded: list[FaultyRemote] = []
        self.peak = 0
        self.is_closed = False
        self._number = next(_numbers)
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._lock = threading.RLock()
        self.living[self.transport, name, rail.device] = self

    # --- scripting ---

    def end(self, request: AgentRequest, answer: Answer = DELIVER) -> bool:
        """End a request under way. False if that has happened meanwhile."""
        with self._lock:
            if request not in self.under_way:
                return False
            self.under_way.remove(request)
            error = self._move(request, answer.moved_bytes) or answer.error
        request.finish(error)
        return True

    def end_all(self, answer: Answer = DELIVER) -> None:
        """End those under way now."""
        for request in list(self.under_way):
            self.end(request, answer)

    # --- the interface ---

    def metadata(self) -> bytes:
        return json.dumps([self.transport, self.name, self.rail.device, self._number]).encode()

    def load_remote(self, metadata: bytes) -> FaultyRemote:
        try:
            transport, name, device, *_ = json.loads(metadata)
        except ValueError:
            raise ProtocolError("not a faulty agent") from None
        assert transport == self.transport
        self.loaded.append(FaultyRemote(name, device))
        return self.loaded[-1]

    def unload_remote(self, remote: FaultyRemote) -> None:
        assert remote.is_loaded, "unloaded twice"
        remote.is_loaded = False
        self.loaded.remove(remote)
        for request in list(self.under_way):
            if request.remote is remote:
                self.end(request, Answer(Unreachable("the peer was unloaded"), moved_bytes=0))

    def export(self, region: Region) -> bytes | None:
        if (self.transport, region.region_id) not in self.exported:
            self.exported[self.transport, region.region_id] = region
            region.on_close(self._forget)
        return b"faulty"

    def _forget(self, region: Region) -> None:
        del self.exported[self.transport, region.region_id]

    def submit(self, request: AgentRequest) -> None:
        if self.before_submit is not None:
            self.before_submit(request)
        with self._lock:
            self.begun.append(request)
            self.under_way.append(request)
            self.peak = max(self.peak, sum(other.remote is request.remote for other in self.under_way))
            answer = self.answers.popleft() if self.answers else self.default
        if self.is_closed:
            self.end(request, Answer(Closed("the agent is closed"), moved_bytes=0))
        elif not request.remote.is_loaded:
            self.end(request, Answer(Unreachable("the peer was unloaded"), moved_bytes=0))
        elif not answer.waits:
            self.end(request, answer)

    def cancel(self, request: AgentRequest) -> None:
        assert request in self.begun, "cancelled before it was submitted"
        if self.ignores_cancel:
            self.has_ignored_a_cancel = True
        else:
            self.end(request, Answer(cancelled(), moved_bytes=0))

    def notify(self, remote: FaultyRemote, message: bytes, deadline: Deadline) -> None:
        answer = self.answers.popleft() if self.answers else self.default
        if answer.error is not None:
            raise answer.error
        self._peer(remote)._inbox.append((self.name, message))

    def notifications(self) -> list[tuple[str, bytes]]:
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def close(self) -> None:
        self.is_closed = True
        if self.living.get((self.transport, self.name, self.rail.device)) is self:
            del self.living[self.transport, self.name, self.rail.device]
        self.end_all(Answer(Closed("the agent is closed"), moved_bytes=0))

    # --- moving bytes ---

    def _peer(self, remote: FaultyRemote) -> "FaultyAgent":
        peer = self.living.get((self.transport, remote.name, remote.device))
        if peer is None:
            raise Unreachable(f"{remote.name} is gone")
        return peer

    def _move(self, request: AgentRequest, limit_bytes: int | None) -> KVStoreError | None:
        """Move at most so many bytes; failures not scripted."""
        left_bytes = request.size_bytes if limit_bytes is None else min(limit_bytes, request.size_bytes)
        if not left_bytes:
            return None
        try:
            request.deadline.left_s()
            self._peer(request.remote)
            for piece in request.pieces:
                size_bytes = min(left_bytes, piece.size_bytes)
                self._copy(request.direction, piece, size_bytes)
                left_bytes -= size_bytes
        except KVStoreError as error:
            return error
        return None

    def _copy(self, direction: Direction, piece: Piece, size_bytes: int) -> None:
        region = self.exported.get((self.transport, piece.remote.region_id))
        if region is None or region.is_closed:
            raise StaleHandle(f"region {piece.remote.region_id} is closed")
        if piece.remote.key != region.write_key and (direction is Direction.WRITE or piece.remote.key != region.read_key):
            raise Denied("this key does not allow it")
        assert piece.local.users > 0, "memory of a transfer that is over"
        here = piece.local.part(piece.local_offset, size_bytes)
        there = region.part(piece.remote_offset, size_bytes)
        if direction is Direction.READ:
            here[:] = there
        else:
            there[:] = here


class SpareAgent(FaultyAgent):
    """The same as another transport."""

    transport = "spare"


class KeyedAgent(FaultyAgent):
    """Each rail has its own key to a region, as with RDMA, and rail9 reaches none."""

    transport = "keyed"

    def export(self, region: Region) -> bytes | None:
        super().export(region)
        return self.rail.device.encode() if self.rail.device != "rail9" else None

    def submit(self, request: AgentRequest) -> None:
        if any(piece.remote.descriptors != {"keyed": request.remote.device.encode()} for piece in request.pieces):
            request.finish(Denied("not this rail's key"))
        else:
            super().submit(request)


class RaisingAgent(FaultyAgent):
    """Breaks the contract of `submit`: raises instead of finishing the request, or after it."""

    transport = "raising"
    finishes_first: ClassVar[bool] = False

    def submit(self, request: AgentRequest) -> None:
        if self.finishes_first:
            super().submit(request)
        raise RuntimeError("a mistake in a plug-in")


class PickyAgent(FaultyAgent):
    """Finds no peer's metadata good enough."""

    transport = "picky"
    is_picky: ClassVar[bool] = True

    def load_remote(self, metadata: bytes) -> FaultyRemote:
        if self.is_picky:
            raise ProtocolError("not picked")
        return super().load_remote(metadata)


class AbstractAgent(TransferAgent):
    """Lacks everything."""

    transport = "abstract"


def topology(*rails: str) -> Topology:
    """A machine with these rails, "rail0" and so on. All are loopback addresses, so that each reaches each."""
    nics = tuple(Nic(name, interface=name, addresses=(f"127.0.1.{int(name[-1]) + 1}",), numa_node=0) for name in rails)
    return Topology("machine", (NumaNode(0, (10,)),), nics)


def settings(transports: str = FAULTY, *, slice_bytes: int = 64, max_attempts: int = 6) -> TransferSettings:
    """Small slices, no probes: what happens is only what the test does."""
    return TransferSettings(transports=transports, slice_bytes=slice_bytes, max_attempts=max_attempts, probe_share=0.0)


def agents(engine: TransferEngine) -> list[FaultyAgent]:
    """The engine's agents, all of which are faulty."""
    return [agent for agent in engine.agents if isinstance(agent, FaultyAgent)]
