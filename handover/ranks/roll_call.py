"""Which requests are over on all ranks of an executor, kept by its rank 0: the others report to it, and it tells them.

Sans-I/O; time is passed in. A request that fails on one rank, or whose rank is gone, is over for all at once, with that error.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, Unreachable

GRACE_NS = 1_000_000_000
"""After a request's deadline: ranks that meet it report in that time."""


class Outcome(NamedTuple):
    """A request is over on all ranks; with the error of the first that failed, or None."""

    request_id: bytes
    error: KVStoreError | None


@dataclass(slots=True)
class _Request:
    dp: int
    deadline_ns: int
    over: set[int] = field(default_factory=set)


class RollCall:
    """See the module. Not thread-safe. An attention-DP group answers for its own requests."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._requests: dict[bytes, _Request] = {}
        self._failed: dict[bytes, int] = {}
        """Failed ones, until when: reports of other ranks still come."""

    def begun(self, request_id: bytes, dp: int, *, deadline_ns: int) -> None:
        """A rank has begun a request."""
        if request_id not in self._failed:
            request = self._requests.setdefault(request_id, _Request(dp, deadline_ns))
            request.deadline_ns = max(request.deadline_ns, deadline_ns)

    def over(self, request_id: bytes, rank: int, error: KVStoreError | None, *, dp: int, deadline_ns: int) -> Outcome | None:
        """It is over on one rank. Returns the outcome if that decides it."""
        if request_id in self._failed:
            return None
        self.begun(request_id, dp, deadline_ns=deadline_ns)
        request = self._requests[request_id]
        request.over.add(rank)
        if error is not None:
            return self._fail(request_id, type(error)(f"rank {rank}: {error}"))
        if request.over >= self._members(request.dp):
            del self._requests[request_id]
            return Outcome(request_id, None)
        return None

    def _members(self, dp: int) -> set[int]:
        return {rank for rank in range(self._parallel.ranks) if self._parallel.group_of(rank) == dp}

    def _fail(self, request_id: bytes, error: KVStoreError) -> Outcome:
        self._failed[request_id] = self._requests.pop(request_id).deadline_ns + GRACE_NS
        return Outcome(request_id, error)

    def lost(self, rank: int) -> list[Outcome]:
        """A rank is gone: what it has not finished has failed."""
        dp = self._parallel.group_of(rank)
        waiting = [request_id for request_id, request in self._requests.items() if request.dp == dp and rank not in request.over]
        return [self._fail(request_id, Unreachable(f"rank {rank} of this executor is gone")) for request_id in waiting]

    def expire(self, now_ns: int) -> list[Outcome]:
        """Requests that some rank never finished, nor began."""
        self._failed = {request_id: until_ns for request_id, until_ns in self._failed.items() if until_ns > now_ns}
        late = [(request_id, request) for request_id, request in self._requests.items() if request.deadline_ns + GRACE_NS <= now_ns]
        return [
            self._fail(request_id, DeadlineExceeded(f"ranks {sorted(self._members(request.dp) - request.over)} did not finish in time"))
            for request_id, request in late
        ]

    def __len__(self) -> int:
        """Requests that are not over."""
        return len(self._requests)
