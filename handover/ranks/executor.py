"""What the ranks of one executor tell one another: what has begun, what is over, what has failed. Rank 0 calls the roll.

A thin shell around RollCall. It also remembers failures of requests that have not begun here, so that they end at once when they do.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.handover.description import RankInfo
from kvstore.handover.handles import Handover
from kvstore.handover.ranks.links import Links
from kvstore.handover.ranks.roll_call import GRACE_NS, Outcome, RollCall
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, ProtocolError, Unreachable, from_code
from kvstore.protocol.handover_messages import Report, Verdict
from kvstore.rpc.reactor import Reactor

BEGUN: Final = 1
OVER: Final = 2
REMEMBERED: Final = 4096
"""Failures kept; the oldest go first."""
MAX_FINISHED: Final = 65_536
"""Outcomes that nobody took; the oldest go first."""
MAX_EARLY: Final = 4096
"""Reports kept until this rank joins."""
REPORT_TIMEOUT_S: Final = 5.0


class Executor:
    """See the module. Not thread-safe: the reactor's thread is the only caller.

    `fail(request_id, error)` is called when another rank has failed a request.
    """

    def __init__(self, parallel: Parallel, rank: int, reactor: Reactor, links: Links, fail: Callable[[bytes, KVStoreError], None]) -> None:
        self._rank = rank
        self._dp = parallel.group_of(rank)
        self._reactor = reactor
        self._links = links
        self._fail = fail
        self._parallel = parallel
        self._ranks: Sequence[RankInfo] = ()
        self._roll = RollCall(Parallel())
        self._begun: dict[bytes, int] = {}
        """Not over here, with their deadlines."""
        self._waiting: dict[bytes, int] = {}
        """Well over here, and not decided."""
        self._failures: OrderedDict[bytes, KVStoreError] = OrderedDict()
        self._early: list[tuple[RankInfo, Report, int]] = []
        """Of ranks that have joined before this one."""
        self._finished: list[Outcome] = []

    def join(self, ranks: Sequence[RankInfo]) -> None:
        """These are the ranks, this one among them."""
        self._ranks = ranks
        self._roll = RollCall(self._parallel)
        if self._rank:
            self._links.open(ranks[0])
        early, self._early = self._early, []
        for peer, report, until_ns in early:
            with contextlib.suppress(ProtocolError):
                self.received(peer, report, until_ns)

    @property
    def _is_leader(self) -> bool:
        return not self._ranks or not self._rank

    # --- of this rank ---

    def begun(self, request_id: bytes, deadline_ns: int) -> None:
        self._begun[request_id] = deadline_ns
        self._report(request_id, BEGUN, None, deadline_ns)

    def over(self, handle: Handover, deadline_ns: int) -> None:
        """It is over here. One that has failed here has failed everywhere, and one that is well here may have failed elsewhere while its
        end was waited for."""
        self._begun.pop(handle.request_id, None)
        error = handle.error or self.failure_of(handle.request_id)
        if error is None:
            self._waiting[handle.request_id] = deadline_ns
        else:
            self.remember(handle.request_id, error)
            self._finish(Outcome(handle.request_id, error))
        self._report(handle.request_id, OVER, handle.error, deadline_ns)

    def _report(self, request_id: bytes, state: int, error: KVStoreError | None, deadline_ns: int) -> None:
        if self._is_leader:
            rank = self._rank if self._ranks else 0
            self._take(rank, 0 if not self._ranks else self._dp, request_id, state, error, deadline_ns)
            return
        text = "" if error is None else str(error)[:1000]
        report = Report(request_id, state, self._dp, 0 if error is None else error.code, text)
        left_s = max((deadline_ns - self._reactor.now_ns()) / 1e9, REPORT_TIMEOUT_S)
        self._links.tell(self._ranks[0], report, deadline_s=left_s, on_answer=lambda _: None)

    def take_finished(self) -> list[Outcome]:
        """For any thread. There is no call in it, so a signal handler that raises loses nothing on the way."""
        finished, self._finished = self._finished, []
        return finished

    def _finish(self, outcome: Outcome) -> None:
        self._finished.append(outcome)
        del self._finished[:-MAX_FINISHED]

    # --- failures of what may not have begun here ---

    def remember(self, request_id: bytes, error: KVStoreError) -> None:
        """Should this request begin here, it has failed already."""
        self._failures[request_id] = error
        while len(self._failures) > REMEMBERED:
            self._failures.popitem(last=False)

    def failure_of(self, request_id: bytes) -> KVStoreError | None:
        return self._failures.get(request_id)

    # --- of other ranks ---

    def received(self, peer: RankInfo, message: Report | Verdict, until_ns: int) -> None:
        """Raises ProtocolError: not a rank of this executor."""
        if not self._ranks and isinstance(message, Report) and len(self._early) < MAX_EARLY:
            self._early.append((peer, message, until_ns))
            return
        if peer.rank >= len(self._ranks) or self._ranks[peer.rank].instance != peer.instance:
            raise ProtocolError("this is not a rank of the executor that was joined")
        error = from_code(message.code, message.text) if message.code else None
        if isinstance(message, Verdict):
            self._decided(Outcome(message.request_id, error))
        else:
            self._take(peer.rank, message.dp, message.request_id, message.state, error, until_ns)

    def _take(self, rank: int, dp: int, request_id: bytes, state: int, error: KVStoreError | None, deadline_ns: int) -> None:
        """At the leader: a report."""
        if state == BEGUN:
            self._roll.begun(request_id, dp, deadline_ns=deadline_ns)
        elif (outcome := self._roll.over(request_id, rank, error, dp=dp, deadline_ns=deadline_ns)) is not None:
            self._announce(outcome, dp)

    def _announce(self, outcome: Outcome, dp: int | None = None) -> None:
        self._decided(outcome)
        code, text = (0, "") if outcome.error is None else (outcome.error.code, str(outcome.error)[:1000])
        verdict = Verdict(outcome.request_id, code, text)
        for info in self._ranks[1:]:
            if dp is None or info.dp == dp:
                self._links.tell(info, verdict, deadline_s=REPORT_TIMEOUT_S, on_answer=lambda _: None)

    def _decided(self, outcome: Outcome) -> None:
        if self._waiting.pop(outcome.request_id, None) is not None:
            self._finish(outcome)
        if outcome.error is not None:  # if it is not over here, it will be
            self.remember(outcome.request_id, outcome.error)
            self._fail(outcome.request_id, outcome.error)

    def lost(self, peer: RankInfo) -> None:
        """A rank is gone, of whatever executor."""
        if peer.rank >= len(self._ranks) or self._ranks[peer.rank].instance != peer.instance:
            return
        if self._is_leader:
            for outcome in self._roll.lost(peer.rank):
                self._announce(outcome)
        elif not peer.rank:
            for request_id in [*self._begun, *self._waiting]:
                self._decided(Outcome(request_id, Unreachable("rank 0 of this executor is gone")))

    def sweep(self, now_ns: int) -> None:
        """What nobody has decided in time."""
        for outcome in self._roll.expire(now_ns):
            self._announce(outcome)
        for request_id, deadline_ns in list(self._waiting.items()):
            if deadline_ns + 2 * GRACE_NS <= now_ns:
                self._decided(Outcome(request_id, DeadlineExceeded("rank 0 of this executor did not say in time that it is over")))
