"""A simulated prefill instance: a queue, one prompt at a time, a prefix cache in its DRAM, rails to send KV caches over.

It computes what it is given and never refuses. The scheduler chooses the instance, simulation.py where the KV cache goes next.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from kvstore.lab.simulator.job import EventQueue, SimulatedJob
from kvstore.lab.simulator.plan import InstanceModel
from kvstore.scheduler.prefix_index import PrefixIndex
from kvstore.tiers.policies.interface import EvictionPolicy

Key: TypeAlias = Hashable


class LocalCache:
    """At most `capacity_blocks` blocks; the policy says which leave. Whatever enters or leaves is told to the index as `instance`."""

    def __init__(self, instance: int, capacity_blocks: int, policy: EvictionPolicy[Key], index: PrefixIndex[Key]) -> None:
        self._instance = instance
        self._capacity_blocks = capacity_blocks
        self._policy = policy
        self._index = index

    def match(self, keys: Sequence[Key]) -> int:
        """The number of leading blocks of `keys` that are here. No access."""
        for number, key in enumerate(keys):
            if key not in self._policy:
                return number
        return len(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """They were read."""
        for key in keys:
            self._policy.touch(key)

    def insert(self, keys: Sequence[Key], *, first: int) -> None:
        """The blocks keys[first:] of a prompt are here now. Of a prompt longer than the cache only the leading ones enter: a tail
        without its head is of no use."""
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
        assert victim is not None, "nothing is pinned here, so a full cache has a victim"
        self._policy.remove(victim)
        self._index.remove(self._instance, (victim,))


class NetworkQueue:
    """The sending side of an instance's network. The receiver is taken to be as fast: a prompt has one receiver, a hot block many."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def backlog_bytes(self, now_s: float) -> int:
        """What was asked for and has not left yet."""
        return round(max(0.0, self._free_at_s - now_s) * self.bytes_per_s)

    def send(self, size_bytes: int, *, now_s: float) -> float:
        """When the last of `size_bytes`, asked for now, has arrived."""
        self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self.bytes_per_s
        return self._free_at_s


class PrefillServer:
    """First come, first served: a prompt whose fetched blocks are still on their way keeps those behind it waiting."""

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
        """The moment the last prefill ended or the running one will."""
        self._all_done_s = 0.0
        """The moment that everything here is expected to be done."""

    def queue_s(self) -> float:
        """Expected seconds until it could start on something new."""
        return max(0.0, self._all_done_s - self._events.now_s)

    def give(self, job: SimulatedJob) -> None:
        """A prompt, with `ready_s` and `expected_prefill_s` filled in."""
        self._queue.append(job)
        self._all_done_s = max(self._all_done_s, job.ready_s) + job.expected_prefill_s
        self.wake()

    def wake(self) -> None:
        """Begin with the first in the queue if nothing is in its way."""
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
        """Foresee the queue anew: what just began may take another time than was expected of it."""
        done_s = self._free_s
        for job in self._queue:
            done_s = max(done_s, job.ready_s) + job.expected_prefill_s
        self._all_done_s = done_s


def count_prefill(job: SimulatedJob, machine: InstanceModel, cache: LocalCache) -> float:
    """What a prefill that begins now takes, by the prefix that is there now; the job's prefix and stages are filled in."""
    request = job.request
    job.prefix_blocks = cache.match(request.keys)
    job.prefix_tokens = request.prefix_tokens(job.prefix_blocks)
    cache.touch(request.keys[: job.prefix_blocks])
    job.prefill_s = machine.times.prefill_s(request.input_tokens, job.prefix_tokens)
    job.load_s = machine.load_s(job.prefix_tokens, computed_s=job.prefill_s)
    return job.prefill_s + job.load_s
