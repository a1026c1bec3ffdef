"""Requests on their way through a simulated cluster, the queue of events, and the load of both pools that an admission policy sees."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvstore.scheduler.admission import PoolLoad
from kvstore.scheduler.request import Decision, Rejection, ScheduleRequest

Action: TypeAlias = Callable[[], None]
NEWEST_SHARE: Final = 0.02
"""Weight of the sequence that ended last in the mean of how long they are decoded: about the last fifty count."""


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """Stages add up: arrival_s + schedule_s + queue_s + fetch_s + load_s + prefill_s = first_token_s, and + stream_s + decode_s =
    finish_s."""

    number: int
    request: ScheduleRequest
    arrival_s: float
    output_tokens: int
    """As they turn out: at least 1."""
    decision: Decision | None = None
    rejection: Rejection | None = None
    queued_s: float = 0.0
    """The moment it was given to its instance."""
    ready_s: float = 0.0
    """The moment the blocks fetched for it are there."""
    expected_prefill_s: float = 0.0
    """By the scheduler's estimate."""
    prefix_blocks: int = 0
    """That were there when its prefill began."""
    prefix_tokens: int = 0
    schedule_s: float = 0.0
    queue_s: float = 0.0
    fetch_s: float = 0.0
    """Waiting for blocks of another instance as the first of its queue."""
    load_s: float = 0.0
    prefill_s: float = 0.0
    stream_s: float = 0.0
    """From the first token to the KV cache being where it is decoded."""
    decode_s: float = 0.0
    first_token_s: float = 0.0
    """As a moment, not a duration. 0 before there is one."""
    finish_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def tokens_s(self) -> float:
        """Mean time between its tokens; 0 for a single one."""
        return (self.finish_s - self.first_token_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def cache_tokens(self) -> int:
        """KV cache that it needs to the end."""
        return self.request.input_tokens + self.output_tokens

    def begin_prefill(self, *, head_s: float, now_s: float) -> None:
        """It is taken off its queue at `now_s`, whose first it has been since `head_s`, or since it came."""
        self.fetch_s = max(0.0, self.ready_s - max(head_s, self.queued_s))
        self.queue_s = now_s - self.queued_s - self.fetch_s


class SimulatedEvent:
    """One action at one time; cancelled, it never happens."""

    __slots__ = ("action", "at_s")

    def __init__(self, at_s: float, action: Action) -> None:
        self.at_s = at_s
        self.action: Action | None = action

    def cancel(self) -> None:
        """It will not happen. A second call, or one after it happened, changes nothing."""
        self.action = None


class EventQueue:
    """Actions by time; those of one moment in the order they were asked for, so that a run repeats exactly."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, SimulatedEvent]] = []
        self._asked = 0

    def at(self, at_s: float, action: Action) -> SimulatedEvent:
        """`action` will be called at `at_s`, not before now."""
        assert at_s >= self.now_s, (at_s, self.now_s)
        event = SimulatedEvent(at_s, action)
        self._asked += 1
        heapq.heappush(self._heap, (at_s, self._asked, event))
        return event

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        while heap:
            at_s, _, event = heapq.heappop(heap)
            if event.action is not None:
                self.now_s = at_s
                event.action()


class InstancePools:
    """Each job is taken, then decoded, then ended; or rejected in between."""

    def __init__(self, *, decode_instances: int) -> None:
        self._decode_instances = decode_instances
        self._prefill_ends_s: dict[int, float] = {}
        self._decode_begun_s: dict[int, float] = {}
        self._context_tokens = 0
        self._decode_s = 0.0

    def load(self, now_s: float) -> PoolLoad:
        """Of this moment."""
        decoded = len(self._decode_begun_s)
        return PoolLoad(
            now_s=now_s,
            decode_instances=self._decode_instances,
            decode_begun_s=list(self._decode_begun_s.values()),
            prefill_ends_s=sorted(self._prefill_ends_s.values()),
            decode_s=self._decode_s,
            context_tokens=self._context_tokens / decoded if decoded else 0.0,
        )

    def taken(self, job: SimulatedJob, *, prefill_end_s: float) -> None:
        """Its first token is expected at that moment."""
        self._prefill_ends_s[job.number] = prefill_end_s

    def prefilled(self, job: SimulatedJob) -> None:
        """Its prefill is over; nothing follows unless `decoded` does."""
        del self._prefill_ends_s[job.number]

    def decoded(self, job: SimulatedJob, *, now_s: float) -> None:
        """From now on."""
        self._decode_begun_s[job.number] = now_s
        self._context_tokens += job.request.input_tokens

    def ended(self, job: SimulatedJob, *, now_s: float) -> None:
        """Its last token came now."""
        lasted_s = now_s - self._decode_begun_s.pop(job.number)
        self._context_tokens -= job.request.input_tokens
        self._decode_s = self._decode_s + NEWEST_SHARE * (lasted_s - self._decode_s) if self._decode_s else lasted_s
