"""Inference instances: their last reports, and the requests sent to them since. Sans-I/O; `now_ns` is passed in.

An instance joins with its first report, and leaves by a request or after `instance_ttl_s` without a report. A
request that it was sent and has not reported is *promised*: it is added to the report's load until the instance
reports it, or until `decision_ttl_s` after its expected arrival. Loads decay between reports: a queue of ten seconds
is one of nine a second later. All state is in memory: instances report again within a second."""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.master.scheduling.estimators import check_report
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Full
from kvstore.scheduler.request import DecodeInstance, PrefillInstance

NS_PER_S: Final = 1_000_000_000
MAX_PROMISED: Final = 65_536
"""Requests under way to one instance; beyond this the oldest counts as lost."""
UNMEASURED_BYTES_PER_S: Final = 1.25e9
"""Assumed send rate of an instance without measurements: 10 Gb/s Ethernet."""
MAX_MOVES: Final = 16
"""Remembered pairs of addresses of one name; beyond this a duplicate has been reported already."""
_REPORTED: Final = -1
NO_LIMIT_TOKENS: Final = 1 << 62


class PromisedWork(NamedTuple):
    """A request that was sent to an instance, should arrive at `at_ns`, and counts as lost at `expires_ns`.

    Its load is `prefill_ns` for prefill and `context_tokens` for decode."""

    at_ns: int
    expires_ns: int
    prefill_ns: int = 0
    context_tokens: int = 0
    sent_ns: int | None = None
    """Set if the instance has the request already, which it prefills first and decodes at `at_ns`; None if it
    arrives then."""

    @property
    def may_be_seen_ns(self) -> int:
        """Earliest time at which a report may include it."""
        return self.at_ns if self.sent_ns is None else self.sent_ns


class Instance(ABC):
    """State that all instances have. `report` is the last one, without samples and seen requests."""

    def __init__(self, report: pb.ReportRequest, now_ns: int) -> None:
        self.report = report
        self.reported_ns = now_ns
        self.scheduled = 0
        """Requests sent to it since it joined."""
        self._promised: dict[int, PromisedWork] = {}
        self._next_expiry_ns = math.inf
        self._recount()

    @property
    def unseen_requests(self) -> int:
        """Promised requests that are neither seen nor lost."""
        return len(self._promised)

    @property
    def unseen_s(self) -> float:
        """Their prefill time, in seconds."""
        return sum(promise.prefill_ns for promise in self._promised.values()) / NS_PER_S

    def promise(self, request_id: int, promise: PromisedWork) -> None:
        """Record that the request was sent to it."""
        self.scheduled += 1
        self._promised[request_id] = promise
        self._next_expiry_ns = min(self._next_expiry_ns, promise.expires_ns)
        if len(self._promised) <= MAX_PROMISED:
            self._count(promise)
        else:
            del self._promised[next(iter(self._promised))]
            self._recount()

    def renew(self, report: pb.ReportRequest, seen: list[int], now_ns: int) -> None:
        """Apply the next report, which includes the requests `seen`, and those expected longer ago than
        `seen_after_s`. Unknown ones are ignored."""
        self.report, self.reported_ns = report, now_ns
        for request_id in seen:
            self._promised.pop(request_id, None)
        if report.seen_after_s:
            since_ns = now_ns - _ns(report.seen_after_s)
            self._promised = {request_id: promise for request_id, promise in self._promised.items() if promise.may_be_seen_ns > since_ns}
        self._recount()

    def forget_lost(self, now_ns: int) -> None:
        """Drop requests that have not arrived for too long."""
        if now_ns < self._next_expiry_ns:
            return
        self._promised = {request_id: promise for request_id, promise in self._promised.items() if promise.expires_ns > now_ns}
        self._next_expiry_ns = min((promise.expires_ns for promise in self._promised.values()), default=math.inf)
        self._recount()

    def _recount(self) -> None:
        """Sum up the report and all promises."""
        self._begin()
        for promise in self._promised.values():
            self._count(promise)

    @abstractmethod
    def _begin(self) -> None:
        """Sum up the report alone."""

    @abstractmethod
    def _count(self, promise: PromisedWork) -> None:
        """Add one promise."""


class PrefillMember(Instance):
    """Prefill side of an instance: computes prompts in the order in which they were sent to it."""

    def __init__(self, report: pb.ReportRequest, now_ns: int) -> None:
        self._free_ns = self._sent_ns = 0
        super().__init__(report, now_ns)
        self._view = PrefillInstance(report.name)
        self._set_backlog()

    def renew(self, report: pb.ReportRequest, seen: list[int], now_ns: int) -> None:
        super().renew(report, seen, now_ns)
        self._set_backlog()

    def send(self, size_bytes: int, now_ns: int) -> None:
        """Record an ordered transfer from it."""
        self._sent_ns = max(self._sent_ns, now_ns) + _ns(size_bytes / self._send_bytes_per_s)

    def at(self, node_id: int | None, received_bytes_per_s: Mapping[Hashable, float]) -> None:
        """Set its live node (None: no live node), and the rates that this measured from others."""
        self._view.place, self._view.received_bytes_per_s = node_id, received_bytes_per_s

    def decodes_at(self, index: int | None) -> None:
        """Set the index of its own decode side, where it decodes its prefills; None if others do."""
        self._view.decodes_at = index

    def view(self, now_ns: int) -> PrefillInstance:
        """Return its view for a dispatcher. The same object each time."""
        self.forget_lost(now_ns)
        view, rate = self._view, self._send_bytes_per_s
        view.queue_s = max(0, self._free_ns - now_ns) / NS_PER_S
        view.send_bytes_per_s = rate
        view.send_backlog_bytes = round(max(0, self._sent_ns - now_ns) / NS_PER_S * rate)
        return view

    @property
    def _send_bytes_per_s(self) -> float:
        return self.report.send_bytes_per_s or UNMEASURED_BYTES_PER_S

    def _set_backlog(self) -> None:
        """Transfers ordered before this report are in its reported backlog: nodes get their commands at once."""
        self._sent_ns = self.reported_ns + _ns(self.report.send_backlog_bytes / self._send_bytes_per_s)

    def _begin(self) -> None:
        self._free_ns = self.reported_ns + _ns(self.report.queue_s)

    def _count(self, promise: PromisedWork) -> None:
        self._free_ns = max(self._free_ns, promise.at_ns) + promise.prefill_ns


class _ArrivalTimes(NamedTuple):
    """Expected arrival times of an instance's promises, as of `scheduled` made and `unseen` left.

    These two numbers identify the set of promises: a new one raises the first, and until then the set only shrinks."""

    scheduled: int
    unseen: int
    at_s: npt.NDArray[np.float64]


class DecodeMember(Instance):
    """Decode side of an instance: produces tokens for all its sequences at once."""

    def __init__(self, report: pb.ReportRequest, now_ns: int) -> None:
        self._context_tokens = 0
        self._arrivals = _ArrivalTimes(0, 0, np.empty(0))
        super().__init__(report, now_ns)
        self._view = DecodeInstance(report.name, is_own=report.role == pb.ROLE_BOTH)

    def view(self, now_ns: int) -> DecodeInstance:
        """Return its view for a dispatcher. The same object each time."""
        self.forget_lost(now_ns)
        view = self._view
        view.batch = self.report.batch + len(self._promised)
        view.context_tokens = self._context_tokens
        view.capacity_tokens = self.report.capacity_tokens or NO_LIMIT_TOKENS
        return view

    def arrivals_s(self) -> npt.NDArray[np.float64]:
        """Return the expected arrival times of its promised requests. O(1) while these are the same."""
        if (self._arrivals.scheduled, self._arrivals.unseen) != (self.scheduled, self.unseen_requests):
            self._arrivals = _ArrivalTimes(self.scheduled, self.unseen_requests, np.array(self._compute_arrivals_s()))
        return self._arrivals.at_s

    def _compute_arrivals_s(self) -> list[float]:
        return [promise.at_ns / NS_PER_S for promise in self._promised.values()]

    def _begin(self) -> None:
        self._context_tokens = self.report.context_tokens

    def _count(self, promise: PromisedWork) -> None:
        self._context_tokens += promise.context_tokens


class Instances:
    """All instances by name; one with both roles is in both maps. Not thread-safe."""

    def __init__(self, *, instance_ttl_s: float, max_instances: int) -> None:
        self._instance_ttl_ns = _ns(instance_ttl_s)
        self._max_instances = max_instances
        self.prefill: dict[str, PrefillMember] = {}
        self.decode: dict[str, DecodeMember] = {}
        self._moves: dict[str, dict[frozenset[str], int]] = {}
        """By name: pairs of addresses between which it moved, and when last; _REPORTED after a duplicate was reported."""

    def report(self, report: pb.ReportRequest, now_ns: int) -> str:
        """Apply an instance's report. Under a new role it is another instance, and its promises are dropped.

        Returns the address of another engine with the same name, once for each pair; "" if there seems to be none. A
        restarted engine moves to another address, but not back within `instance_ttl_s`. Raises InvalidArgument for
        an invalid report, Full when there are `max_instances` others; nothing has changed then."""
        check_report(report)
        known = self.get(report.name)
        if known is None and (others := len(self.prefill.keys() | self.decode.keys())) >= self._max_instances:
            raise Full(f"there are {others} instances already, as many as max_instances allows: {report.name!r} cannot join")
        other = "" if known is None else self._moved(report.name, known.report.address, report.address, now_ns)
        kept, seen = _without_lists(report), list(report.seen_request_ids)
        if known is not None and known.report.role == report.role:
            for members in (self.prefill, self.decode):
                if report.name in members:
                    members[report.name].renew(kept, seen, now_ns)
            return other
        self._remove(report.name)
        if report.role != pb.ROLE_DECODE:
            self.prefill[report.name] = PrefillMember(kept, now_ns)
        if report.role != pb.ROLE_PREFILL:
            self.decode[report.name] = DecodeMember(kept, now_ns)
        return other

    def leave(self, name: str) -> None:
        """Remove an instance. An unknown one is ignored: it may have expired before."""
        self._remove(name)
        self._moves.pop(name, None)

    def get(self, name: str) -> Instance | None:
        """Return an instance; of one with both roles the prefill side."""
        return self.prefill.get(name) or self.decode.get(name)

    def each(self) -> list[Instance]:
        """Return every instance once, prefill first."""
        return [*self.prefill.values(), *(member for name, member in self.decode.items() if name not in self.prefill)]

    def expire(self, now_ns: int) -> list[str]:
        """Remove the silent instances; return their names."""
        since_ns = now_ns - self._instance_ttl_ns
        silent = [member.report.name for member in self.each() if member.reported_ns <= since_ns]
        for name in silent:
            self.leave(name)
        return silent

    def _remove(self, name: str) -> None:
        self.prefill.pop(name, None)
        self.decode.pop(name, None)

    def _moved(self, name: str, before: str, now: str, now_ns: int) -> str:
        """See `report`."""
        if before == now:
            return ""
        moves, pair = self._moves.setdefault(name, {}), frozenset((before, now))
        last_ns = moves.get(pair)
        if last_ns == _REPORTED or (last_ns is None and len(moves) == MAX_MOVES):
            return ""
        is_back = last_ns is not None and now_ns - last_ns < self._instance_ttl_ns
        moves[pair] = _REPORTED if is_back else now_ns
        return before if is_back else ""

    def check_integrity(self) -> None:
        """Assert that names are unique and limits hold. For tests."""
        both = {name for name, member in self.prefill.items() if member.report.role == pb.ROLE_BOTH}
        assert self.prefill.keys() & self.decode.keys() == both
        assert all((member.report.role == pb.ROLE_BOTH) == (name in both) for name, member in self.decode.items())
        assert len(self.each()) <= self._max_instances
        assert all(self.get(name) is not None and len(moves) <= MAX_MOVES for name, moves in self._moves.items())
        assert all(member.unseen_requests <= MAX_PROMISED for member in (*self.prefill.values(), *self.decode.values()))


def _without_lists(report: pb.ReportRequest) -> pb.ReportRequest:
    """Return the part of a report that is kept."""
    kept = pb.ReportRequest()
    kept.CopyFrom(report)
    for field in ("seen_request_ids", "prefill_samples", "decode_samples", "engine_cache"):
        kept.ClearField(field)
    return kept


def _ns(seconds: float) -> int:
    return int(seconds * NS_PER_S)
