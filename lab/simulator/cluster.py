"""Simulated cluster: instances, and the transfers between them (fetched prefixes, KV caches for decode).

It carries out the scheduler's decisions, and reports to the scheduler what a live cluster would.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvstore.lab.simulator.coupled import Chunked, CoupledServer, DecodeFirst, PrefillFirst
from kvstore.lab.simulator.decode import DecodeLoop, DecodeServer, Gaps
from kvstore.lab.simulator.job import EventQueue, SimulatedJob
from kvstore.lab.simulator.plan import BLOCK_TOKENS, InstanceModel, Mode, SimulationPlan
from kvstore.lab.simulator.prefill import LocalCache, PrefillServer
from kvstore.scheduler.prefix_index import PrefixIndex
from kvstore.scheduler.request import Decision, DecodeInstance, PrefillInstance
from kvstore.tiers.policies.by_name import make_policy

Prompter: TypeAlias = PrefillServer | CoupledServer
"""Instance that prefills."""
Decoder: TypeAlias = DecodeServer | CoupledServer
"""Instance that decodes."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Callbacks at the end of a prefill (False: the job is rejected) and at the end of a job."""

    on_prefilled: Callable[[SimulatedJob], bool]
    on_end: Callable[[SimulatedJob], None]


class SimulatedCluster(ABC):
    """Instances on one clock. In coupled modes `prompters` and `decoders` are the same instances."""

    prompters: Sequence[Prompter]
    decoders: Sequence[Decoder]

    def __init__(self, plan: SimulationPlan, machine: InstanceModel, events: EventQueue, callbacks: Callbacks) -> None:
        self.index: PrefixIndex[Hashable] = PrefixIndex()
        self.gaps = Gaps()
        self.fetched_bytes = 0
        self.streamed_bytes = 0
        self._plan = plan
        self._machine = machine
        self._events = events
        self._callbacks = callbacks

    @abstractmethod
    def start(self, job: SimulatedJob, decision: Decision) -> None:
        """Start a job as decided."""

    @property
    def loops(self) -> Sequence[DecodeLoop]:
        return [decoder.loop for decoder in self.decoders]

    def prefill_views(self) -> list[PrefillInstance]:
        """Return the current reports of the prefill instances."""
        now_s, rate = self._events.now_s, self._machine.send_bytes_per_s
        return [
            PrefillInstance(f"prefill {number}", server.queue_s(), server.rails.backlog_bytes(now_s), rate)
            for number, server in enumerate(self.prompters)
        ]

    def decode_views(self) -> list[DecodeInstance]:
        """Return the current reports of the decode instances."""
        capacity = self._machine.capacity_tokens
        return [
            DecodeInstance(f"decode {number}", server.sequences, server.context_tokens(), capacity)
            for number, server in enumerate(self.decoders)
        ]

    def match(self, keys: Sequence[Hashable]) -> list[int]:
        """Return the number of cached leading blocks of a prompt at each prefill instance."""
        return self.index.match(keys, len(self.prompters))

    def _cache(self, number: int) -> LocalCache:
        policy = make_policy(self._plan.policy, clock=lambda: self._events.now_s)
        return LocalCache(number, self._plan.cache_blocks, policy, self.index)

    def _enqueue(self, job: SimulatedJob, decision: Decision) -> None:
        """Start the fetch of remote blocks, if decided, and queue the job at its prefill instance."""
        now_s = self._events.now_s
        receiver = self.prompters[decision.prefill]
        job.decision = decision
        job.queued_s = job.ready_s = now_s
        job.expected_prefill_s = decision.prefill_s
        if decision.transfer_from is not None and decision.transfer_blocks:
            sender = self.prompters[decision.transfer_from]
            first, end = decision.prefix_blocks - decision.transfer_blocks, decision.prefix_blocks
            keys = job.request.keys[:end]
            sender.cache.touch(keys[first:])
            size_bytes = decision.transfer_blocks * BLOCK_TOKENS * self._machine.kv_bytes_per_token
            self.fetched_bytes += size_bytes
            job.ready_s = sender.rails.send(size_bytes, now_s=now_s)
            self._events.at(job.ready_s, lambda: self._fetched(receiver, keys, first))
        receiver.enqueue(job)

    def _fetched(self, receiver: Prompter, keys: Sequence[Hashable], first: int) -> None:
        """Cache fetched blocks at the receiver, so that hot blocks spread."""
        receiver.cache.insert(keys, first=first)
        receiver.wake()


class Disaggregated(SimulatedCluster):
    """Separate prefill and decode instances; KV caches are streamed over the prefill instance's rails."""

    def __init__(self, plan: SimulationPlan, machine: InstanceModel, events: EventQueue, callbacks: Callbacks) -> None:
        super().__init__(plan, machine, events, callbacks)
        self.prefill = [
            PrefillServer(machine, events, self._cache(number), on_start=self._started, on_end=self._prefilled)
            for number in range(plan.prefill)
        ]
        self.decode = [DecodeServer(machine, events, self.gaps, callbacks.on_end) for _ in range(plan.decode)]
        self.prompters, self.decoders = self.prefill, self.decode
        self._streams_end_s: dict[int, float] = {}

    def start(self, job: SimulatedJob, decision: Decision) -> None:
        self.decode[decision.decode].reserve(job)
        self._enqueue(job, decision)

    def _started(self, job: SimulatedJob, end_s: float) -> None:
        """Stream the KV cache layer by layer during the prefill; the last layer follows at its end."""
        if self._plan.overlap and job.output_tokens > 1:
            last_s = self._cache_bytes(job) / self._machine.layers / self._machine.send_bytes_per_s
            self._streams_end_s[job.number] = max(self._send(job), end_s + last_s)

    def _prefilled(self, job: SimulatedJob) -> None:
        assert job.decision is not None
        server = self.decode[job.decision.decode]
        stream_end_s = self._streams_end_s.pop(job.number, 0.0)
        if not self._callbacks.on_prefilled(job):
            server.cancel(job)
        elif job.output_tokens == 1:
            server.cancel(job)
            job.finish_s = self._events.now_s
            self._callbacks.on_end(job)
        else:
            stream_end_s = stream_end_s or self._send(job)
            job.stream_s = stream_end_s - self._events.now_s
            self._events.at(stream_end_s, lambda: server.enqueue(job))

    def _send(self, job: SimulatedJob) -> float:
        assert job.decision is not None
        size_bytes = self._cache_bytes(job)
        self.streamed_bytes += size_bytes
        return self.prefill[job.decision.prefill].rails.send(size_bytes, now_s=self._events.now_s)

    def _cache_bytes(self, job: SimulatedJob) -> int:
        return job.request.input_tokens * self._machine.kv_bytes_per_token


class Coupled(SimulatedCluster):
    """Instances that prefill and decode. A request is decoded where it was prefilled; the decided decode instance is ignored."""

    def __init__(self, plan: SimulationPlan, machine: InstanceModel, events: EventQueue, callbacks: Callbacks) -> None:
        super().__init__(plan, machine, events, callbacks)
        kind: Any = {Mode.PREFILL_FIRST: PrefillFirst, Mode.DECODE_FIRST: DecodeFirst, Mode.CHUNKED: Chunked}[plan.mode]
        more = {"chunk_tokens": plan.chunk_tokens} if plan.mode is Mode.CHUNKED else {}
        self.servers: list[CoupledServer] = [
            kind(machine, events, self._cache(number), self.gaps, on_prefilled=callbacks.on_prefilled, on_end=callbacks.on_end, **more)
            for number in range(plan.instances)
        ]
        self.prompters = self.decoders = self.servers

    def start(self, job: SimulatedJob, decision: Decision) -> None:
        self._enqueue(job, decision)


def make_cluster(plan: SimulationPlan, machine: InstanceModel, events: EventQueue, callbacks: Callbacks) -> SimulatedCluster:
    """Create the cluster for the plan's mode."""
    return (Coupled if plan.mode.is_coupled else Disaggregated)(plan, machine, events, callbacks)
