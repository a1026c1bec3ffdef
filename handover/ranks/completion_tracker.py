"""Completion of requests over all ranks of an executor: which have begun, are over, or have failed.

Rank 0 has the tracker: other ranks report to it, and it notifies them. A request that fails on one rank, or whose rank
is unreachable, is over for all at once, with that error. `CompletionCoordinator` connects the sans-I/O `CompletionTracker` to the
ranks. It also remembers failures of requests that have not begun here, so that they end as soon as they begin.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore.handover.description import RankInfo
from kvstore.handover.handles import Handover
from kvstore.handover.ranks.rank_connections import RankConnections
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, ProtocolError, Unreachable, from_code
from kvstore.protocol.handover_messages import RankReport, RequestEnded
from kvstore.rpc.reactor import Reactor

GRACE_NS = 1_000_000_000
"""Time after a request's deadline within which ranks report."""
BEGUN: Final = 1
OVER: Final = 2
REMEMBERED: Final = 4096
"""Remembered failures; the oldest are dropped first."""
MAX_FINISHED: Final = 65_536
"""Outcomes that were not taken; the oldest are dropped first."""
MAX_EARLY_REQUESTS: Final = 4096
"""Reports that are kept until this rank joins."""
REPORT_TIMEOUT_S: Final = 5.0


class RequestOutcome(NamedTuple):
    """A request that is over on all ranks, with the error of the first rank that failed, or None."""

    request_id: bytes
    error: KVStoreError | None


@dataclass(slots=True)
class _RequestProgress:
    dp: int
    deadline_ns: int
    over: set[int] = field(default_factory=set)


class CompletionTracker:
    """Progress of requests on rank 0. Not thread-safe. Each attention-DP group completes its own requests."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._requests: dict[bytes, _RequestProgress] = {}
        self._failed: dict[bytes, int] = {}
        """Failed requests, kept until this time for late reports of other ranks."""

    def begun(self, request_id: bytes, dp: int, *, deadline_ns: int) -> None:
        """A rank has begun a request."""
        if request_id not in self._failed:
            request = self._requests.setdefault(request_id, _RequestProgress(dp, deadline_ns))
            request.deadline_ns = max(request.deadline_ns, deadline_ns)

    def over(self, request_id: bytes, rank: int, error: KVStoreError | None, *, dp: int, deadline_ns: int) -> RequestOutcome | None:
        """A request is over on one rank. Return the outcome if that completes it."""
        if request_id in self._failed:
            return None
        self.begun(request_id, dp, deadline_ns=deadline_ns)
        request = self._requests[request_id]
        request.over.add(rank)
        if error is not None:
            return self._fail(request_id, type(error)(f"rank {rank}: {error}"))
        if request.over >= self._members(request.dp):
            del self._requests[request_id]
            return RequestOutcome(request_id, None)
        return None

    def _members(self, dp: int) -> set[int]:
        return {rank for rank in range(self._parallel.ranks) if self._parallel.group_of(rank) == dp}

    def _fail(self, request_id: bytes, error: KVStoreError) -> RequestOutcome:
        self._failed[request_id] = self._requests.pop(request_id).deadline_ns + GRACE_NS
        return RequestOutcome(request_id, error)

    def lost(self, rank: int) -> list[RequestOutcome]:
        """A rank is unreachable: return the failures of all that it has not finished."""
        dp = self._parallel.group_of(rank)
        waiting = [request_id for request_id, request in self._requests.items() if request.dp == dp and rank not in request.over]
        return [self._fail(request_id, Unreachable(f"rank {rank} of this executor is unreachable")) for request_id in waiting]

    def expire(self, now_ns: int) -> list[RequestOutcome]:
        """Return the failures of requests that some rank did not finish, or begin, in time."""
        self._failed = {request_id: until_ns for request_id, until_ns in self._failed.items() if until_ns > now_ns}
        late = [(request_id, request) for request_id, request in self._requests.items() if request.deadline_ns + GRACE_NS <= now_ns]
        return [
            self._fail(request_id, DeadlineExceeded(f"ranks {sorted(self._members(request.dp) - request.over)} did not finish in time"))
            for request_id, request in late
        ]

    def __len__(self) -> int:
        """Return the number of unfinished requests."""
        return len(self._requests)


class CompletionCoordinator:
    """A rank's part in its executor's agreement on completed requests. The reactor's thread only.

    `fail(request_id, error)` is called when another rank failed a request.
    """

    def __init__(
        self, parallel: Parallel, rank: int, reactor: Reactor, connections: RankConnections, fail: Callable[[bytes, KVStoreError], None]
    ) -> None:
        self._rank = rank
        self._dp = parallel.group_of(rank)
        self._reactor = reactor
        self._links = connections
        self._fail = fail
        self._parallel = parallel
        self._ranks: Sequence[RankInfo] = ()
        self._tracker = CompletionTracker(Parallel())
        self._begun: dict[bytes, int] = {}
        """Deadlines of requests that are not over here."""
        self._waiting: dict[bytes, int] = {}
        """Deadlines of requests that succeeded here and wait for other ranks."""
        self._failures: OrderedDict[bytes, KVStoreError] = OrderedDict()
        self._early_requests: list[tuple[RankInfo, RankReport, int]] = []
        """Reports of ranks that joined before this one."""
        self._finished: list[RequestOutcome] = []

    def join(self, ranks: Sequence[RankInfo]) -> None:
        """Set the ranks of the executor, including this one."""
        self._ranks = ranks
        self._tracker = CompletionTracker(self._parallel)
        if self._rank:
            self._links.open(ranks[0])
        early, self._early_requests = self._early_requests, []
        for peer, report, until_ns in early:
            with contextlib.suppress(ProtocolError):
                self.received(peer, report, until_ns)

    @property
    def _is_leader(self) -> bool:
        return not self._ranks or not self._rank

    # --- requests of this rank ---

    def begun(self, request_id: bytes, deadline_ns: int) -> None:
        self._begun[request_id] = deadline_ns
        self._report(request_id, BEGUN, None, deadline_ns)

    def over(self, handle: Handover, deadline_ns: int) -> None:
        """A request is over here. A failure here is a failure everywhere; a success may have failed elsewhere while
        its end was awaited."""
        self._begun.pop(handle.request_id, None)
        error = handle.error or self.failure_of(handle.request_id)
        if error is None:
            self._waiting[handle.request_id] = deadline_ns
        else:
            self.remember(handle.request_id, error)
            self._finish(RequestOutcome(handle.request_id, error))
        self._report(handle.request_id, OVER, handle.error, deadline_ns)

    def _report(self, request_id: bytes, state: int, error: KVStoreError | None, deadline_ns: int) -> None:
        if self._is_leader:
            rank = self._rank if self._ranks else 0
            self._take(rank, 0 if not self._ranks else self._dp, request_id, state, error, deadline_ns)
            return
        text = "" if error is None else str(error)[:1000]
        report = RankReport(request_id, state, self._dp, 0 if error is None else error.code, text)
        left_s = max((deadline_ns - self._reactor.now_ns()) / 1e9, REPORT_TIMEOUT_S)
        self._links.send_request(self._ranks[0], report, deadline_s=left_s, on_answer=lambda _: None)

    def take_finished(self) -> list[RequestOutcome]:
        """Return the outcomes since the last call. Any thread may call it. It makes no calls itself, so an exception
        of a signal handler loses nothing."""
        finished, self._finished = self._finished, []
        return finished

    def _finish(self, outcome: RequestOutcome) -> None:
        self._finished.append(outcome)
        del self._finished[:-MAX_FINISHED]

    # --- failures of requests that may not have begun here ---

    def remember(self, request_id: bytes, error: KVStoreError) -> None:
        """Fail this request if it begins here later."""
        self._failures[request_id] = error
        while len(self._failures) > REMEMBERED:
            self._failures.popitem(last=False)

    def failure_of(self, request_id: bytes) -> KVStoreError | None:
        return self._failures.get(request_id)

    # --- messages of other ranks ---

    def received(self, peer: RankInfo, message: RankReport | RequestEnded, until_ns: int) -> None:
        """Handle a report or an outcome. Raises ProtocolError: the peer is not a rank of this executor."""
        if not self._ranks and isinstance(message, RankReport) and len(self._early_requests) < MAX_EARLY_REQUESTS:
            self._early_requests.append((peer, message, until_ns))
            return
        if peer.rank >= len(self._ranks) or self._ranks[peer.rank].instance != peer.instance:
            raise ProtocolError("this is not a rank of the executor that was joined")
        error = from_code(message.code, message.text) if message.code else None
        if isinstance(message, RequestEnded):
            self._decided(RequestOutcome(message.request_id, error))
        else:
            self._take(peer.rank, message.dp, message.request_id, message.state, error, until_ns)

    def _take(self, rank: int, dp: int, request_id: bytes, state: int, error: KVStoreError | None, deadline_ns: int) -> None:
        """Process a report, as the leader."""
        if state == BEGUN:
            self._tracker.begun(request_id, dp, deadline_ns=deadline_ns)
        elif (outcome := self._tracker.over(request_id, rank, error, dp=dp, deadline_ns=deadline_ns)) is not None:
            self._announce(outcome, dp)

    def _announce(self, outcome: RequestOutcome, dp: int | None = None) -> None:
        self._decided(outcome)
        code, text = (0, "") if outcome.error is None else (outcome.error.code, str(outcome.error)[:1000])
        verdict = RequestEnded(outcome.request_id, code, text)
        for info in self._ranks[1:]:
            if dp is None or info.dp == dp:
                self._links.send_request(info, verdict, deadline_s=REPORT_TIMEOUT_S, on_answer=lambda _: None)

    def _decided(self, outcome: RequestOutcome) -> None:
        if self._waiting.pop(outcome.request_id, None) is not None:
            self._finish(outcome)
        if outcome.error is not None:  # end it here, too
            self.remember(outcome.request_id, outcome.error)
            self._fail(outcome.request_id, outcome.error)

    def lost(self, peer: RankInfo) -> None:
        """Handle an unreachable rank of any executor."""
        if peer.rank >= len(self._ranks) or self._ranks[peer.rank].instance != peer.instance:
            return
        if self._is_leader:
            for outcome in self._tracker.lost(peer.rank):
                self._announce(outcome)
        elif not peer.rank:
            for request_id in [*self._begun, *self._waiting]:
                self._decided(RequestOutcome(request_id, Unreachable("rank 0 of this executor is unreachable")))

    def expire(self, now_ns: int) -> None:
        """Expire requests that were not completed in time."""
        for outcome in self._tracker.expire(now_ns):
            self._announce(outcome)
        for request_id, deadline_ns in list(self._waiting.items()):
            if deadline_ns + 2 * GRACE_NS <= now_ns:
                self._decided(RequestOutcome(request_id, DeadlineExceeded("rank 0 of this executor did not report its completion in time")))
