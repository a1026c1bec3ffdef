"""Model of one server whose KV cache is too small for its users, in discrete steps, under one strategy.

Continuous batching. Between two decode steps one request may start: its prompt is prefilled in a step of its own, or its cache is fetched
from a lower tier; the batch stalls meanwhile. Copies between tiers stall the server, too.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import Final

from kvstore.lab.pressure.load import FinishReason, Generation, RequestSource
from kvstore.lab.pressure.strategies import AdmissionStrategy, PreemptionStrategy, ServingModel, Strategy
from kvstore.scheduler.running_batch import RunningBatch

WATERMARK: Final = 0.01
"""Share of the cache that a request must leave free to start beside others, so that the batch's next tokens do not displace it.

Source: the default of vLLM's block manager.
"""


@dataclass(slots=True, eq=False)
class BatchMember:
    """A started request: in the batch, or displaced from it."""

    request: Generation
    tokens: int = 0
    """Output tokens when it last joined or left the batch."""
    held_in: int | None = None
    """Index of the lower tier with its cache; None: no cache, or in the batch."""
    held_bytes: int = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens of cache when it last joined or left the batch."""
        return self.request.prompt_tokens + self.tokens - 1

    @property
    def number(self) -> int:
        return self.request.number


class Batch:
    """Batch of members in order of arrival, with their current and final cache sizes. A step is O(1), join and leave are O(n)."""

    def __init__(self) -> None:
        self.full_tokens = 0
        """Sum of the members' largest caches."""
        self._running: RunningBatch[BatchMember] = RunningBatch()
        self._members: list[BatchMember] = []

    def __len__(self) -> int:
        return len(self._members)

    @property
    def cached_tokens(self) -> int:
        """Cache of all members."""
        return self._running.context_tokens

    def join(self, member: BatchMember) -> None:
        """Add a member that has at least one output token left."""
        self._running.join(member, context_tokens=member.cached_tokens, steps=member.request.output_tokens - member.tokens)
        insort(self._members, member, key=_number)
        self.full_tokens += member.request.most_cached_tokens

    def leave_youngest(self) -> BatchMember:
        """Remove and return the latest member. The batch must not be empty."""
        member = self._members[-1]
        self._left(member, lacking=self._running.leave(member))
        return member

    def step(self) -> list[BatchMember]:
        """Add a token to each member; remove and return the finished ones."""
        ended = sorted(self._running.advance(), key=_number)
        for member in ended:
            self._left(member, lacking=0)
        return ended

    def check_integrity(self) -> None:
        """Assert that the sums match the members. For tests."""
        self._running.check_integrity()
        assert set(self._members) == set(self._running.members())
        assert self.full_tokens == sum(each.request.most_cached_tokens for each in self._members)
        assert self._members == sorted(self._members, key=_number)

    def _left(self, member: BatchMember, *, lacking: int) -> None:
        self._members.remove(member)
        member.tokens = member.request.output_tokens - lacking
        self.full_tokens -= member.request.most_cached_tokens


def _number(member: BatchMember) -> int:
    return member.number


@dataclass(slots=True)
class ServerWork:
    """Counters of a server's work."""

    prefilled_tokens: int = 0
    prefill_s: float = 0.0
    recomputed_tokens: int = 0
    """Prefilled tokens that had been computed before."""
    recompute_s: float = 0.0
    """Part of prefill_s for displaced requests."""
    displacements: int = 0
    offloaded_bytes: int = 0
    fetched_bytes: int = 0
    copying_s: float = 0.0


class PressedServer:
    """The server and its users. Not thread-safe.

    Call `step` until it returns False; `ended` then has every request.
    """

    def __init__(self, server: ServingModel, strategy: Strategy, users: RequestSource) -> None:
        self.now_s = 0.0
        self.work = ServerWork()
        self.ended: list[Generation] = []
        self._server, self._strategy, self._users = server, strategy, users
        self._reserves = strategy.displaced is PreemptionStrategy.NONE
        self._waiting: deque[Generation] = deque()
        self._batch = Batch()
        self._paused: list[BatchMember] = []
        """Displaced members, by arrival."""
        self._free_bytes = [tier.capacity_bytes for tier in server.lower_tiers]

    def step(self) -> bool:
        """Run at most one start and one decode step; if neither is possible, advance to the next arrival. False if there is none."""
        self._take_arrivals()
        has_started = self._start_next()
        if len(self._batch):
            self._decode()
        elif not has_started:
            next_s = self._users.next_s
            if next_s is None:
                return False
            self.now_s = max(self.now_s, next_s)
        return True

    def check_integrity(self) -> None:
        """Assert that no request is lost and no tier exceeds its capacity. For tests."""
        self._batch.check_integrity()
        assert self._held_tokens <= self._server.cache_tokens
        for number, (tier, free) in enumerate(zip(self._server.lower_tiers, self._free_bytes, strict=True)):
            held = sum(member.held_bytes for member in self._paused if member.held_in == number)
            assert 0 <= free == tier.capacity_bytes - held
        assert self._users.sent == len(self.ended) + len(self._waiting) + len(self._batch) + len(self._paused)

    @property
    def _held_tokens(self) -> int:
        return self._batch.full_tokens if self._reserves else self._batch.cached_tokens

    def _take_arrivals(self) -> None:
        while (at_s := self._users.next_s) is not None and at_s <= self.now_s:
            request = self._users.take()
            if request.most_cached_tokens > self._server.cache_tokens:
                self._end(request, FinishReason.REJECTED)
            else:
                self._waiting.append(request)

    def _start_next(self) -> bool:
        """Start one request if possible. Displaced ones precede waiting ones, unless newcomers displace."""
        if self._waiting and self._strategy.newcomers is AdmissionStrategy.DISPLACE:
            request = self._waiting.popleft()
            while not self._fits(request.prompt_tokens):
                self._displace_youngest()
            self._prefill(BatchMember(request))
            return True
        return self._resume() if self._paused else self._admit()

    def _resume(self) -> bool:
        member = self._paused[0]
        is_held = member.held_in is not None
        if not self._fits(member.cached_tokens + (not is_held)):
            return False
        del self._paused[0]
        if is_held:
            self._fetch(member)
        else:
            self._prefill(member)
        return True

    def _admit(self) -> bool:
        """Start the first waiting request that fits. Those before it wait or are rejected, by the strategy."""
        while self._waiting:
            request = self._waiting[0]
            if self._fits(request.most_cached_tokens if self._reserves else request.prompt_tokens):
                self._prefill(BatchMember(self._waiting.popleft()))
                return True
            if self._strategy.newcomers is AdmissionStrategy.WAIT:
                return False
            self._end(self._waiting.popleft(), FinishReason.REJECTED)
        return False

    def _fits(self, tokens: int) -> bool:
        """Return whether a request can start with this many tokens. Alone it may fill the cache; larger ones were rejected on arrival."""
        spare = 0 if self._reserves or not len(self._batch) else int(WATERMARK * self._server.cache_tokens)
        return self._held_tokens + tokens + spare <= self._server.cache_tokens

    def _prefill(self, member: BatchMember) -> None:
        """Prefill the prompt and the output so far, which yields one more output token."""
        request = member.request
        tokens = request.prompt_tokens + member.tokens
        took_s = self._server.times.prefill_s(tokens, 0)
        if request.is_started:
            self.work.recomputed_tokens += member.cached_tokens
            self.work.recompute_s += took_s
        else:
            request.is_started, request.wait_s = True, self.now_s - request.arrival_s
            request.ttft_s = request.wait_s + took_s
        self.now_s += took_s
        self.work.prefilled_tokens += tokens
        self.work.prefill_s += took_s
        member.tokens += 1
        if member.tokens == request.output_tokens:
            self._end(request, FinishReason.COMPLETED)
        else:
            self._batch.join(member)

    def _decode(self) -> None:
        """Run a decode step, after displacing members until all new tokens fit."""
        while not self._reserves and self._batch.cached_tokens + len(self._batch) > self._server.cache_tokens:
            self._displace_youngest()
        self.now_s += self._server.times.tbt_s(len(self._batch), self._batch.cached_tokens)
        for member in self._batch.step():
            self._end(member.request, FinishReason.COMPLETED)

    def _displace_youngest(self) -> None:
        member = self._batch.leave_youngest()
        self.work.displacements += 1
        if self._strategy.displaced is PreemptionStrategy.EVICTED:
            self._end(member.request, FinishReason.EVICTED)
            return
        if self._strategy.displaced is PreemptionStrategy.OFFLOADED:
            self._offload(member)
        insort(self._paused, member, key=lambda each: each.number)

    def _offload(self, member: BatchMember) -> None:
        """Copy the cache to the first tier that can hold it; without one it is dropped."""
        size_bytes = round(member.cached_tokens * self._server.kv_bytes_per_token)
        number = next((number for number, free in enumerate(self._free_bytes) if free >= size_bytes), None)
        if number is not None:
            member.held_in, member.held_bytes = number, size_bytes
            self._free_bytes[number] -= size_bytes
            self.work.offloaded_bytes += size_bytes
            self._copy(size_bytes, number)

    def _fetch(self, member: BatchMember) -> None:
        assert member.held_in is not None
        self._free_bytes[member.held_in] += member.held_bytes
        self.work.fetched_bytes += member.held_bytes
        self._copy(member.held_bytes, member.held_in)
        member.held_in, member.held_bytes = None, 0
        self._batch.join(member)

    def _copy(self, size_bytes: int, tier: int) -> None:
        took_s = size_bytes / self._server.lower_tiers[tier].bytes_per_s
        self.now_s += took_s
        self.work.copying_s += took_s

    def _end(self, request: Generation, ending: FinishReason) -> None:
        request.ending, request.ended_s = ending, self.now_s
        self.ended.append(request)
        self._users.finish(request.user, now_s=self.now_s)
