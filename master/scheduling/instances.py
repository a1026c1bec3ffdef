"""The instances that requests are sent to: what each last reported, and what was sent to it since. Sans-I/O; `now_ns` is passed in.

An instance joins with its first report and leaves when it says so or is silent for `instance_ttl_s`. What it was sent and has not
named as seen is *promised*: it is counted on top of the report until the instance names it, or until it should have come in
`decision_ttl_s` ago. Between reports time passes here too: what was a queue of ten seconds is one of nine a second later. Nothing
outlives the master: instances report again within a second.
"""

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
"""Requests on their way to one instance: beyond, the oldest counts as lost."""
UNMEASURED_BYTES_PER_S: Final = 1.25e9
"""What an instance is taken to send until it has measured itself: 10 Gb/s Ethernet."""
MAX_MOVES: Final = 16
"""Pairs of addresses that are remembered of one name: what moves between more has been told of by then."""
_TOLD: Final = -1
NO_LIMIT_TOKENS: Final = 1 << 62


class PromisedWork(NamedTuple):
    """A request that was sent to an instance, should come in at `at_ns`, and counts as lost at `expires_ns`.

    To prefill it is worth `prefill_ns`, to decode `context_tokens`.
    """

    at_ns: int
    expires_ns: int
    prefill_ns: int = 0
    context_tokens: int = 0
    sent_ns: int | None = None
    """When the instance has it already, which prefills it before it decodes it at `at_ns`; None: it comes in then."""

    @property
    def may_be_seen_ns(self) -> int:
        """From when on a report may include it."""
        return self.at_ns if self.sent_ns is None else self.sent_ns


class Instance(ABC):
    """What all instances have. `report` is the last one, without samples and seen requests."""

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
        """Requests promised and neither seen nor lost."""
        return len(self._promised)

    @property
    def unseen_s(self) -> float:
        """Seconds of prefill that they are worth."""
        return sum(promise.prefill_ns for promise in self._promised.values()) / NS_PER_S

    def promise(self, request_id: int, promise: PromisedWork) -> None:
        """The request was sent to it."""
        self.scheduled += 1
        self._promised[request_id] = promise
        self._next_expiry_ns = min(self._next_expiry_ns, promise.expires_ns)
        if len(self._promised) <= MAX_PROMISED:
            self._count(promise)
        else:
            del self._promised[next(iter(self._promised))]
            self._recount()

    def renew(self, report: pb.ReportRequest, seen: list[int], now_ns: int) -> None:
        """Its next report, which includes the requests `seen`, and those that it was to have longer ago than `seen_after_s`; those that are
        not promised are ignored."""
        self.report, self.reported_ns = report, now_ns
        for request_id in seen:
            self._promised.pop(request_id, None)
        if report.seen_after_s:
            since_ns = now_ns - _ns(report.seen_after_s)
            self._promised = {request_id: promise for request_id, promise in self._promised.items() if promise.may_be_seen_ns > since_ns}
        self._recount()

    def forget_lost(self, now_ns: int) -> None:
        """Count no longer what has not come in for too long."""
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
        """One promise more."""


class PrefillMember(Instance):
    """Computes prompts one after the other, in the order in which they were sent to it."""

    def __init__(self, report: pb.ReportRequest, now_ns: int) -> None:
        self._free_ns = self._sent_ns = 0
        super().__init__(report, now_ns)
        self._view = PrefillInstance(report.name)
        self._told()

    def renew(self, report: pb.ReportRequest, seen: list[int], now_ns: int) -> None:
        super().renew(report, seen, now_ns)
        self._told()

    def send(self, size_bytes: int, now_ns: int) -> None:
        """It was told to send so much."""
        self._sent_ns = max(self._sent_ns, now_ns) + _ns(size_bytes / self._send_bytes_per_s)

    def at(self, node_id: int | None, received_bytes_per_s: Mapping[Hashable, float]) -> None:
        """Its blocks are at that live node (None: there is none), which measured these rates from others."""
        self._view.place, self._view.received_bytes_per_s = node_id, received_bytes_per_s

    def decodes_at(self, index: int | None) -> None:
        """It decodes what it prefills, and that is its decode side's index; None: others do."""
        self._view.decodes_at = index

    def view(self, now_ns: int) -> PrefillInstance:
        """As a dispatcher sees it now. The same object each time."""
        self.forget_lost(now_ns)
        view, rate = self._view, self._send_bytes_per_s
        view.queue_s = max(0, self._free_ns - now_ns) / NS_PER_S
        view.send_bytes_per_s = rate
        view.send_backlog_bytes = round(max(0, self._sent_ns - now_ns) / NS_PER_S * rate)
        return view

    @property
    def _send_bytes_per_s(self) -> float:
        return self.report.send_bytes_per_s or UNMEASURED_BYTES_PER_S

    def _told(self) -> None:
        """What it was told to send before this report is in the reported backlog: nodes are told at once."""
        self._sent_ns = self.reported_ns + _ns(self.report.send_backlog_bytes / self._send_bytes_per_s)

    def _begin(self) -> None:
        self._free_ns = self.reported_ns + _ns(self.report.queue_s)

    def _count(self, promise: PromisedWork) -> None:
        self._free_ns = max(self._free_ns, promise.at_ns) + promise.prefill_ns


class _Arrivals(NamedTuple):
    """When what was promised to an instance should come in, as of so many promises made and left.

    These two tell one set of promises from any other of the same instance: a new one adds to the first, and till then they only grow fewer.
    """

    scheduled: int
    unseen: int
    at_s: npt.NDArray[np.float64]


class DecodeMember(Instance):
    """Produces tokens for all its sequences at once."""

    def __init__(self, report: pb.ReportRequest, now_ns: int) -> None:
        self._context_tokens = 0
        self._arrivals = _Arrivals(0, 0, np.empty(0))
        super().__init__(report, now_ns)
        self._view = DecodeInstance(report.name, is_own=report.role == pb.ROLE_BOTH)

    def view(self, now_ns: int) -> DecodeInstance:
        """As a dispatcher sees it now. The same object each time."""
        self.forget_lost(now_ns)
        view = self._view
        view.batch = self.report.batch + len(self._promised)
        view.context_tokens = self._context_tokens
        view.capacity_tokens = self.report.capacity_tokens or NO_LIMIT_TOKENS
        return view

    def arrivals_s(self) -> npt.NDArray[np.float64]:
        """When each of the requests promised to it should come in. O(1) as long as these are the same."""
        if (self._arrivals.scheduled, self._arrivals.unseen) != (self.scheduled, self.unseen_requests):
            self._arrivals = _Arrivals(self.scheduled, self.unseen_requests, np.array(self._arriving_s()))
        return self._arrivals.at_s

    def _arriving_s(self) -> list[float]:
        return [promise.at_ns / NS_PER_S for promise in self._promised.values()]

    def _begin(self) -> None:
        self._context_tokens = self.report.context_tokens

    def _count(self, promise: PromisedWork) -> None:
        self._context_tokens += promise.context_tokens


class Instances:
    """All of them, by name: one that does both is in either list. Not thread-safe."""

    def __init__(self, *, instance_ttl_s: float, max_instances: int) -> None:
        self._instance_ttl_ns = _ns(instance_ttl_s)
        self._max_instances = max_instances
        self.prefill: dict[str, PrefillMember] = {}
        self.decode: dict[str, DecodeMember] = {}
        self._moves: dict[str, dict[frozenset[str], int]] = {}
        """Of each name, between which two addresses it has moved, and when last; _TOLD: that two go by it has been told."""

    def report(self, report: pb.ReportRequest, now_ns: int) -> str:
        """An instance lives. Under a new role it is another instance, and what was promised to the former one is forgotten.

        Returns the address of another engine that goes by the same name, once for each two; "": there seems to be none. One that is started
        anew elsewhere moves, but not there and back within `instance_ttl_s`. Raises InvalidArgument for a report that cannot be, Full when
        there are `max_instances` others; it has changed nothing then.
        """
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
        """It ends. One that is not known is ignored: it may have been silent for too long before."""
        self._remove(name)
        self._moves.pop(name, None)

    def get(self, name: str) -> Instance | None:
        """Of one that does both, its prefill side."""
        return self.prefill.get(name) or self.decode.get(name)

    def each(self) -> list[Instance]:
        """Every instance once, prefill first."""
        return [*self.prefill.values(), *(member for name, member in self.decode.items() if name not in self.prefill)]

    def expire(self, now_ns: int) -> list[str]:
        """Let the silent ones leave: their names."""
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
        if last_ns == _TOLD or (last_ns is None and len(moves) == MAX_MOVES):
            return ""
        is_back = last_ns is not None and now_ns - last_ns < self._instance_ttl_ns
        moves[pair] = _TOLD if is_back else now_ns
        return before if is_back else ""

    def check_integrity(self) -> None:
        """Assert that every name is that of one instance, and that none is over a limit. For tests."""
        both = {name for name, member in self.prefill.items() if member.report.role == pb.ROLE_BOTH}
        assert self.prefill.keys() & self.decode.keys() == both
        assert all((member.report.role == pb.ROLE_BOTH) == (name in both) for name, member in self.decode.items())
        assert len(self.each()) <= self._max_instances
        assert all(self.get(name) is not None and len(moves) <= MAX_MOVES for name, moves in self._moves.items())
        assert all(member.unseen_requests <= MAX_PROMISED for member in (*self.prefill.values(), *self.decode.values()))


def _without_lists(report: pb.ReportRequest) -> pb.ReportRequest:
    """What is worth keeping of a report."""
    kept = pb.ReportRequest()
    kept.CopyFrom(report)
    for field in ("seen_request_ids", "prefill_samples", "decode_samples", "engine_cache"):
        kept.ClearField(field)
    return kept


def _ns(seconds: float) -> int:
    return int(seconds * NS_PER_S)
