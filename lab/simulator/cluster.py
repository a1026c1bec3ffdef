"""The instances of a simulated cluster and what passes between them: fetched prefixes, and KV caches on their way to be decoded.

It does as the scheduler decided (simulation.py asks it) and shows the scheduler what a live cluster would report.
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
"""What computes prompts."""
Decoder: TypeAlias = DecodeServer | CoupledServer
"""What decodes."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the simulation does when a prefill is over (false: the job goes no further) and when a job is."""

    on_prefilled: Callable[[SimulatedJob], bool]
    on_end: Callable[[SimulatedJob], None]


class SimulatedCluster(ABC):
    """Instances and one clock. `prompters` and `decoders` are the same ones where each does both."""

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
        """Send it on its way."""

    @property
    def loops(self) -> Sequence[DecodeLoop]:
        return [decoder.loop for decoder in self.decoders]

    def prefill_views(self) -> list[PrefillInstance]:
        """As they report themselves now."""
        now_s, rate = self._events.now_s, self._machine.send_bytes_per_s
        return [
            PrefillInstance(f"prefill {number}", server.queue_s(), server.rails.backlog_bytes(now_s), rate)
            for number, server in enumerate(self.prompters)
        ]

    def decode_views(self) -> list[DecodeInstance]:
        """As they report themselves now."""
        capacity = self._machine.capacity_tokens
        return [
            DecodeInstance(f"decode {number}", server.sequences, server.context_tokens(), capacity)
            for number, server in enumerate(self.decoders)
        ]

    def match(self, keys: Sequence[Hashable]) -> list[int]:
        """Leading blocks of a prompt at each instance that computes prompts."""
        return self.index.match(keys, len(self.prompters))

    def _cache(self, number: int) -> LocalCache:
        policy = make_policy(self._plan.policy, clock=lambda: self._events.now_s)
        return LocalCache(number, self._plan.cache_blocks, policy, self.index)

    def _give(self, job: SimulatedJob, decision: Decision) -> None:
        """To the instance that computes it, once the blocks it lacks are asked for."""
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
        receiver.give(job)

    def _fetched(self, receiver: Prompter, keys: Sequence[Hashable], first: int) -> None:
        """The receiver holds these blocks from now on: so hot ones spread."""
        receiver.cache.insert(keys, first=first)
        receiver.wake()


class Disaggregated(SimulatedCluster):
    """Prefill instances and decode instances; KV caches go from one to the other over the prefill instance's rails."""

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
        self.decode[decision.decode].promise(job)
        self._give(job, decision)

    def _started(self, job: SimulatedJob, end_s: float) -> None:
        """Layer by layer the KV cache is sent while it is computed; the last layer only after it."""
        if self._plan.overlap and job.output_tokens > 1:
            last_s = self._cache_bytes(job) / self._machine.layers / self._machine.send_bytes_per_s
            self._streams_end_s[job.number] = max(self._send(job), end_s + last_s)

    def _prefilled(self, job: SimulatedJob) -> None:
        assert job.decision is not None
        server = self.decode[job.decision.decode]
        stream_end_s = self._streams_end_s.pop(job.number, 0.0)
        if not self._callbacks.on_prefilled(job):
            server.break_off(job)
        elif job.output_tokens == 1:
            server.break_off(job)
            job.finish_s = self._events.now_s
            self._callbacks.on_end(job)
        else:
            stream_end_s = stream_end_s or self._send(job)
            job.stream_s = stream_end_s - self._events.now_s
            self._events.at(stream_end_s, lambda: server.give(job))

    def _send(self, job: SimulatedJob) -> float:
        assert job.decision is not None
        size_bytes = self._cache_bytes(job)
        self.streamed_bytes += size_bytes
        return self.prefill[job.decision.prefill].rails.send(size_bytes, now_s=self._events.now_s)

    def _cache_bytes(self, job: SimulatedJob) -> int:
        return job.request.input_tokens * self._machine.kv_bytes_per_token


class Coupled(SimulatedCluster):
    """Instances that do both: a prompt is decoded where it was computed, whatever decode instance was decided on."""

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
        self._give(job, decision)


def make_cluster(plan: SimulationPlan, machine: InstanceModel, events: EventQueue, callbacks: Callbacks) -> SimulatedCluster:
    """As the plan's mode says."""
    return (Coupled if plan.mode.is_coupled else Disaggregated)(plan, machine, events, callbacks)
