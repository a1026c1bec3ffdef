"""Simulated requests, the event queue, and the load of both pools for the admission policy."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvstore.scheduler.admission import PoolLoad
from kvstore.scheduler.request import Decision, Rejection, ScheduleRequest

Action: TypeAlias = Callable[[], None]
NEWEST_SHARE: Final = 0.02
"""Weight of the newest sequence in the moving average of decode times; about the last fifty count."""


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """A request with the durations of its stages.

    arrival_s + schedule_s + queue_s + fetch_s + load_s + prefill_s = first_token_s, and first_token_s + stream_s + decode_s = finish_s.
    """

    number: int
    request: ScheduleRequest
    arrival_s: float
    output_tokens: int
    """Actual length of the output, at least 1."""
    decision: Decision | None = None
    rejection: Rejection | None = None
    queued_s: float = 0.0
    """Time at which it was queued at its instance."""
    ready_s: float = 0.0
    """Time at which its fetched blocks have arrived."""
    expected_prefill_s: float = 0.0
    """The scheduler's estimate."""
    prefix_blocks: int = 0
    """Cached blocks at the start of its prefill."""
    prefix_tokens: int = 0
    schedule_s: float = 0.0
    queue_s: float = 0.0
    fetch_s: float = 0.0
    """Wait for fetched blocks at the head of the queue."""
    load_s: float = 0.0
    prefill_s: float = 0.0
    stream_s: float = 0.0
    """From the first token to the arrival of the KV cache at the decode instance."""
    decode_s: float = 0.0
    first_token_s: float = 0.0
    """A point in time; 0 before the first token."""
    finish_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def tokens_s(self) -> float:
        """Mean time between tokens; 0 for a single token."""
        return (self.finish_s - self.first_token_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def cache_tokens(self) -> int:
        """Final size of its KV cache."""
        return self.request.input_tokens + self.output_tokens

    def begin_prefill(self, *, head_s: float, now_s: float) -> None:
        """Compute queue and fetch times at the start of the prefill. `head_s`: since when it could have been at the head of the queue."""
        self.fetch_s = max(0.0, self.ready_s - max(head_s, self.queued_s))
        self.queue_s = now_s - self.queued_s - self.fetch_s


class SimulatedEvent:
    """An action at a point in time, which can be cancelled."""

    __slots__ = ("action", "at_s")

    def __init__(self, at_s: float, action: Action) -> None:
        self.at_s = at_s
        self.action: Action | None = action

    def cancel(self) -> None:
        """Cancel the action. Idempotent; a no-op after the action."""
        self.action = None


class EventQueue:
    """Event queue with a simulated clock. Actions of equal time run in order of insertion, so runs are reproducible."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, SimulatedEvent]] = []
        self._asked = 0

    def at(self, at_s: float, action: Action) -> SimulatedEvent:
        """Schedule `action` at `at_s`, which must not be in the past."""
        assert at_s >= self.now_s, (at_s, self.now_s)
        event = SimulatedEvent(at_s, action)
        self._asked += 1
        heapq.heappush(self._heap, (at_s, self._asked, event))
        return event

    def run(self) -> None:
        """Run until the queue is empty."""
        heap = self._heap
        while heap:
            at_s, _, event = heapq.heappop(heap)
            if event.action is not None:
                self.now_s = at_s
                event.action()


class InstancePools:
    """Tracks the load of the prefill and decode pools. A job is `taken`, `prefilled`, `decoded` and `ended`, or rejected in between."""

    def __init__(self, *, decode_instances: int) -> None:
        self._decode_instances = decode_instances
        self._prefill_ends_s: dict[int, float] = {}
        self._decode_begun_s: dict[int, float] = {}
        self._context_tokens = 0
        self._decode_s = 0.0

    def load(self, now_s: float) -> PoolLoad:
        """Return the current load."""
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
        """A job is scheduled; its first token is expected at `prefill_end_s`."""
        self._prefill_ends_s[job.number] = prefill_end_s

    def prefilled(self, job: SimulatedJob) -> None:
        """A prefill has ended."""
        del self._prefill_ends_s[job.number]

    def decoded(self, job: SimulatedJob, *, now_s: float) -> None:
        """A job's decode starts."""
        self._decode_begun_s[job.number] = now_s
        self._context_tokens += job.request.input_tokens

    def ended(self, job: SimulatedJob, *, now_s: float) -> None:
        """A job has its last token."""
        lasted_s = now_s - self._decode_begun_s.pop(job.number)
        self._context_tokens -= job.request.input_tokens
        self._decode_s = self._decode_s + NEWEST_SHARE * (lasted_s - self._decode_s) if self._decode_s else lasted_s
