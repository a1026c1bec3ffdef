"""The cluster simulator: a trace goes through a dispatcher and an admission policy, the same code as live, into simulated instances.

Event-driven: nothing is computed between two things that happen, and decode steps of an unchanged batch are one event (batch.py).
Deterministic: nothing here is random, and equal inputs (a dispatcher with the same seed) give equal reports. What the instances do is in
prefill.py, decode.py and orders.py, what passes between them in cluster.py.

What is left out: output tokens of one turn that the next turn's prompt repeats (the trace names them as blocks of that prompt), failures,
preemption, and any difference between predicted and true times but that of what interferes.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.protocol.errors import TraceError
from kvstore.scheduler.admission import Admission
from kvstore.scheduler.decision import Decision, Reason, Rejection
from kvstore.scheduler.dispatcher import Dispatcher
from kvstore.scheduler.request import Request
from kvstore.scheduler.simulator.cluster import Callbacks, make_cluster
from kvstore.scheduler.simulator.events import EventQueue
from kvstore.scheduler.simulator.job import Job
from kvstore.scheduler.simulator.machine import Machine
from kvstore.scheduler.simulator.plan import BLOCK_TOKENS, Plan
from kvstore.scheduler.simulator.pools import Pools
from kvstore.scheduler.simulator.report import Report, Sample, make_report

MAX_SAMPLES: Final = 4096
"""Of the load: where more would be needed every second one is dropped, and the interval doubled. A trace may have pauses of years."""


class Simulation:
    """One run over one trace; a second needs a new one, and a dispatcher and an admission policy of its own."""

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        dispatcher: Dispatcher,
        admission: Admission,
        *,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_progress` is called once for each request that is finished or rejected."""
        self.events = EventQueue()
        self.cluster = make_cluster(plan, machine, self.events, Callbacks(self._prefilled, self._ended))
        self.jobs: list[Job] = []
        self._plan = plan
        self._machine = machine
        self._dispatcher = dispatcher
        self._admission = admission
        self._on_progress = on_progress
        self._pools = Pools(decode_instances=len(self.cluster.decoders))
        self._samples: list[Sample] = []
        self._sample_s = plan.sample_s
        self._begin_ms = 0.0
        self._open = 0
        self._end_s = 0.0
        self._arrivals: Iterator[TraceRequest] = iter(())

    def run(self, requests: Iterable[TraceRequest]) -> Report:
        """Raises TraceError for a request that is earlier than the one before it, and whatever `requests` raises."""
        self._arrivals = iter(requests)
        self._expect_next()
        self._sample()
        self.events.run()
        return make_report(self._plan, self._machine, self.cluster, self.jobs, self._samples, self._end_s)

    def _expect_next(self) -> None:
        found = next(self._arrivals, None)
        if found is None:
            return
        if not self.jobs:
            self._begin_ms = found.timestamp_ms
        arrival_s = (found.timestamp_ms - self._begin_ms) / 1000 / self._plan.rate
        if self.jobs and arrival_s < self.jobs[-1].arrival_s:
            raise TraceError(f"request {len(self.jobs) + 1} is earlier than the one before it: sort the trace by timestamp")
        request = Request(
            keys=found.hash_ids,
            input_tokens=max(1, found.input_length),
            block_tokens=BLOCK_TOKENS,
            output_tokens=max(1, found.output_length),
            slo=self._plan.enforced,
        )
        job = Job(len(self.jobs), request, arrival_s, request.output_tokens)
        self.jobs.append(job)
        self._open += 1
        self.events.at(arrival_s, lambda: self._arrive(job))

    def _arrive(self, job: Job) -> None:
        job.schedule_s = self._plan.decision_s
        self.events.at(job.arrival_s + job.schedule_s, lambda: self._decide(job))
        self._expect_next()

    def _decide(self, job: Job) -> None:
        found = self._choose(job)
        if isinstance(found, Rejection):
            self._reject(job, found)
            return
        self._pools.taken(job, prefill_end_s=self.events.now_s + found.ttft_s)
        self.cluster.start(job, found)

    def _choose(self, job: Job) -> Decision | Rejection:
        """As a live scheduler: the dispatcher, then the admission policy."""
        capacity = self._machine.capacity_tokens
        if job.cache_tokens > capacity:
            return Rejection(Reason.CAPACITY, job.cache_tokens, capacity)
        cluster, request = self.cluster, job.request
        found = self._dispatcher.dispatch(request, cluster.match(request.keys), cluster.prefill_views(), cluster.decode_views())
        if isinstance(found, Rejection):
            return found
        load = self._pools.load(self.events.now_s)
        return self._admission.on_arrival(load, self._plan.slo, ttft_s=found.ttft_s) or found

    def _prefilled(self, job: Job) -> bool:
        """Whether it may go on to be decoded."""
        self._pools.prefilled(job)
        rejection = self._admission.on_decode(self._pools.load(self.events.now_s), self._plan.slo)
        if rejection is not None:
            self._reject(job, rejection)
            return False
        self._pools.decoded(job, now_s=self.events.now_s)
        return True

    def _ended(self, job: Job) -> None:
        job.decode_s = job.finish_s - job.first_token_s - job.stream_s
        self._pools.ended(job, now_s=self.events.now_s)
        self._close()

    def _reject(self, job: Job, rejection: Rejection) -> None:
        job.rejection = rejection
        self._close()

    def _close(self) -> None:
        self._open -= 1
        self._end_s = self.events.now_s
        self._on_progress()

    def _sample(self) -> None:
        """The load of the pools now, and again later unless everything is over."""
        if not self._open:
            return
        waits = [server.queue_s() for server in self.cluster.prompters]
        batches = [(len(loop.batch), loop.context_tokens()) for loop in self.cluster.loops]
        steps_s = [self._machine.tbt_s(size, context) if size else 0.0 for size, context in batches]
        self._samples.append(
            Sample(
                self.events.now_s,
                sum(waits) / len(waits),
                sum(size for size, _ in batches) / len(batches),
                sum(steps_s) / len(steps_s),
            )
        )
        if len(self._samples) >= MAX_SAMPLES:
            del self._samples[1::2]
            self._sample_s *= 2
        self.events.at(self.events.now_s + self._sample_s, self._sample)
