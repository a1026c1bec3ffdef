"""Common base of the sending and the receiving side of a rank: requests, their failure and their end.

The reactor's thread makes all calls.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvstore.handover.description import RankInfo
from kvstore.handover.handles import Handover
from kvstore.handover.movements.movement import LayerWindow, MovementEnd
from kvstore.handover.movements.parts import RequestState
from kvstore.handover.resources import RankResources
from kvstore.protocol.errors import KVStoreError, StaleHandle


class RequestMachine(Protocol):
    """State machine of a request: CacheSender or CacheReceiver."""

    error: KVStoreError | None

    @property
    def state(self) -> RequestState: ...

    def fail(self, error: KVStoreError) -> bool: ...

    def needs(self, rank: int) -> bool: ...


class PartMover(Protocol):
    """PartSender or PartReceiver: transfers the parts of one pair of ranks."""

    window: LayerWindow | None

    def release(self, *, is_fenced: bool) -> None: ...


@dataclass(slots=True, eq=False)
class SideRequest:
    """A request on one side. `asked`: the remote ranks that take part, by their number."""

    handle: Handover
    machine: RequestMachine
    ending: MovementEnd
    deadline_ns: int
    asked: dict[int, RankInfo] = field(default_factory=dict)
    window: LayerWindow | None = None
    """Write access to the pool, if remote ranks have it."""

    @property
    def movers(self) -> Collection[PartMover]:
        raise NotImplementedError


R = TypeVar("R", bound=SideRequest)


class HandoverSide(Generic[R]):
    """Requests of one side. Subclasses start and carry out transfers."""

    def __init__(self, resources: RankResources) -> None:
        self._resources = resources
        self._requests: dict[bytes, R] = {}

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._requests

    def handles(self) -> list[Handover]:
        """Return the handles of unfinished requests."""
        return [request.handle for request in self._requests.values()]

    def fail(self, request_id: bytes, error: KVStoreError, reported_by: RankInfo | None = None) -> bool:
        """Fail a request because of a remote failure or a cancellation. Returns False if it is unknown. Raises
        StaleHandle: `reported_by` does not take part in it."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if reported_by is not None and reported_by.instance not in {info.instance for info in request.asked.values()}:
            raise StaleHandle("only ranks that take part in a request may stop it")
        self._fail(request, error, reported_by=reported_by)
        return True

    def lost(self, info: RankInfo, error: KVStoreError) -> None:
        """Fail the requests that still need a rank which is unreachable."""
        for request in list(self._requests.values()):
            asked = request.asked.get(info.rank)
            if asked is not None and asked.instance == info.instance and request.machine.needs(info.rank):
                self._fail(request, error, reported_by=info)

    def _fail(self, request: R, error: KVStoreError, *, reported_by: RankInfo | None = None) -> None:
        if not request.machine.fail(error):
            return
        for info in request.asked.values():
            if reported_by is None or info.instance != reported_by.instance:
                self._resources.stop(info, request.handle.request_id, error)
        self._settle(request)

    def _settle(self, request: R) -> None:
        """End a finished request: its transfers and memory access first, then its handle."""
        if request.machine.state is RequestState.OVER:
            windows = [request.window, *(mover.window for mover in request.movers)]
            is_failed = request.machine.error is not None
            request.ending.begin([window for window in windows if window is not None], is_failed=is_failed)

    def _finish(self, request: R, is_fenced: bool) -> None:
        handle = request.handle
        del self._requests[handle.request_id]
        for mover in request.movers:
            mover.release(is_fenced=is_fenced)
        handle.finish(request.machine.error, is_fenced=is_fenced)
        self._resources.over(handle, request.deadline_ns)
