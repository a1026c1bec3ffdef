"""Simulated prefill instance: a FIFO queue, a prefix cache in DRAM, and the network for KV caches."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from kvstore.lab.simulator.job import EventQueue, SimulatedJob
from kvstore.lab.simulator.plan import InstanceModel
from kvstore.scheduler.prefix_index import PrefixIndex
from kvstore.tiers.policies.interface import EvictionPolicy

Key: TypeAlias = Hashable


class LocalCache:
    """Prefix cache of `capacity_blocks` blocks with an eviction policy. Insertions and evictions are reported to the prefix index."""

    def __init__(self, instance: int, capacity_blocks: int, policy: EvictionPolicy[Key], index: PrefixIndex[Key]) -> None:
        self._instance = instance
        self._capacity_blocks = capacity_blocks
        self._policy = policy
        self._index = index

    def match(self, keys: Sequence[Key]) -> int:
        """Return the number of cached leading blocks of `keys`. Not an access."""
        for number, key in enumerate(keys):
            if key not in self._policy:
                return number
        return len(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """Record an access to the blocks."""
        for key in keys:
            self._policy.touch(key)

    def insert(self, keys: Sequence[Key], *, first: int) -> None:
        """Cache the blocks keys[first:] of a prompt. Of a prompt longer than the cache only the leading blocks are cached."""
        for number in range(first, min(len(keys), self._capacity_blocks)):
            key = keys[number]
            if key in self._policy:
                self._policy.touch(key)
                continue
            if len(self._policy) >= self._capacity_blocks:
                self._evict()
            self._policy.insert(key, keys[number - 1] if number else None)
            self._index.add(self._instance, (key,))

    def _evict(self) -> None:
        victim = self._policy.victim()
        assert victim is not None, "a full cache without pins has a victim"
        self._policy.remove(victim)
        self._index.remove(self._instance, (victim,))


class NetworkQueue:
    """FIFO model of an instance's outgoing network. Receivers are assumed not to be a bottleneck."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def backlog_bytes(self, now_s: float) -> int:
        """Return the bytes that are queued and not sent yet."""
        return round(max(0.0, self._free_at_s - now_s) * self.bytes_per_s)

    def send(self, size_bytes: int, *, now_s: float) -> float:
        """Queue `size_bytes` now; return the time of their arrival."""
        self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self.bytes_per_s
        return self._free_at_s


class PrefillServer:
    """Prefill instance with a FIFO queue: a prompt that waits for fetched blocks delays those behind it."""

    def __init__(
        self,
        machine: InstanceModel,
        events: EventQueue,
        cache: LocalCache,
        *,
        on_start: Callable[[SimulatedJob, float], None],
        on_end: Callable[[SimulatedJob], None],
    ) -> None:
        self.cache = cache
        self.rails = NetworkQueue(machine.send_bytes_per_s)
        self.busy_s = 0.0
        self.flops = 0.0
        self._machine = machine
        self._events = events
        self._on_start = on_start
        self._on_end = on_end
        self._queue: deque[SimulatedJob] = deque()
        self._running: SimulatedJob | None = None
        self._free_s = 0.0
        """End of the last or current prefill."""
        self._all_done_s = 0.0
        """Expected end of all queued prompts."""

    def queue_s(self) -> float:
        """Return the expected seconds until a new prompt could start."""
        return max(0.0, self._all_done_s - self._events.now_s)

    def enqueue(self, job: SimulatedJob) -> None:
        """Queue a prompt whose `ready_s` and `expected_prefill_s` are set."""
        self._queue.append(job)
        self._all_done_s = max(self._all_done_s, job.ready_s) + job.expected_prefill_s
        self.wake()

    def wake(self) -> None:
        """Start the first prompt of the queue if it is ready and the instance is idle."""
        now_s = self._events.now_s
        if self._running is None and self._queue and self._queue[0].ready_s <= now_s:
            self._begin(self._queue.popleft(), now_s)

    def _begin(self, job: SimulatedJob, now_s: float) -> None:
        job.begin_prefill(head_s=self._free_s, now_s=now_s)
        self._running = job
        duration_s = count_prefill(job, self._machine, self.cache)
        self.flops += self._machine.times.prefill_flops(job.request.input_tokens, job.prefix_tokens)
        self.busy_s += duration_s
        self._free_s = now_s + duration_s
        self._expect()
        self._on_start(job, self._free_s)
        self._events.at(self._free_s, self._end)

    def _end(self) -> None:
        job, self._running = self._running, None
        assert job is not None
        job.first_token_s = self._events.now_s
        self.cache.insert(job.request.keys, first=job.prefix_blocks)
        self._on_end(job)
        self.wake()

    def _expect(self) -> None:
        """Recompute the expected end of the queue from the actual end of the current prefill."""
        done_s = self._free_s
        for job in self._queue:
            done_s = max(done_s, job.ready_s) + job.expected_prefill_s
        self._all_done_s = done_s


def count_prefill(job: SimulatedJob, machine: InstanceModel, cache: LocalCache) -> float:
    """Start a prefill with the prefix cached now: set the job's prefix and stage times, and return the duration."""
    request = job.request
    job.prefix_blocks = cache.match(request.keys)
    job.prefix_tokens = request.prefix_tokens(job.prefix_blocks)
    cache.touch(request.keys[: job.prefix_blocks])
    job.prefill_s = machine.times.prefill_s(request.input_tokens, job.prefix_tokens)
    job.load_s = machine.load_s(job.prefix_tokens, computed_s=job.prefill_s)
    return job.prefill_s + job.load_s
