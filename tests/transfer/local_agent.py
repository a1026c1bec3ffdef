"""A transfer agent between regions of one process, as a user might write one: for tests of what stands on any agent."""

import threading
from collections import deque
from typing import ClassVar

from kvstore.protocol.errors import Closed, KVStoreError, ProtocolError, Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import AgentRequest, Direction, Rail, TransferAgent, cancelled
from kvstore.transfer.memory.region import Region

MAGIC = b"LOCAL "


class LocalAgent(TransferAgent):
    """Copies at once, in the calling thread. Faults: `is_stalled` requests wait to be cancelled or for their deadline, `is_deaf`
    agents lose notifications, and `refuses_export` is a transport that cannot reach the memory."""

    transport = "local"
    agents: ClassVar[dict[str, "LocalAgent"]] = {}
    refuses_export: ClassVar[bool] = False

    def __init__(self, name: str, rail: Rail) -> None:
        super().__init__(name, rail)
        self.is_stalled = self.is_deaf = self.is_closed = False
        self._regions: dict[int, Region] = {}
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._lock = threading.Lock()
        self.agents[name] = self

    def metadata(self) -> bytes:
        return MAGIC + self.name.encode()

    def load_remote(self, metadata: bytes) -> str:
        if not metadata.startswith(MAGIC):
            raise ProtocolError("not a local agent")
        return metadata.removeprefix(MAGIC).decode()

    def export(self, region: Region) -> bytes | None:
        self._regions[region.region_id] = region
        region.on_close(self._forget)
        return None if self.refuses_export else b"local"

    def _forget(self, region: Region) -> None:
        self._regions.pop(region.region_id, None)

    def submit(self, request: AgentRequest) -> None:
        request.state = threading.Lock()
        if self.is_stalled:
            return
        try:
            peer = self._peer(request.remote)
            for local, local_offset, remote, remote_offset, size in request.pieces:
                here = local.part(local_offset, size)
                there = peer._regions[remote.region_id].part(remote_offset, size)
                target, source = (here, there) if request.direction is Direction.READ else (there, here)
                target[:] = source
        except KVStoreError as error:
            self._finish(request, error)
        else:
            self._finish(request, None)

    def run(self, request: AgentRequest) -> None:
        ended = threading.Event()
        while not request.is_over:
            try:
                ended.wait(min(0.01, request.deadline.left_s()))
            except KVStoreError as error:
                self._finish(request, error)

    def cancel(self, request: AgentRequest) -> None:
        self._finish(request, cancelled())

    def notify(self, remote: str, message: bytes, deadline: Deadline) -> None:
        deadline.left_s()
        peer = self._peer(remote)
        if not peer.is_deaf:
            peer._inbox.append((self.name, message))

    def notifications(self) -> list[tuple[str, bytes]]:
        if self.is_closed:
            raise Closed(f"{self.name} is closed")
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def close(self) -> None:
        self.is_closed = True
        self.agents.pop(self.name, None)

    def _peer(self, name: str) -> "LocalAgent":
        if self.is_closed:
            raise Closed(f"{self.name} is closed")
        if name not in self.agents:
            raise Unreachable(f"{name} is gone")
        return self.agents[name]

    def _finish(self, request: AgentRequest, error: KVStoreError | None) -> None:
        with self._lock:
            is_first = not request.is_over and request.state is not None
            request.state = None
        if is_first:
            request.finish(error)
