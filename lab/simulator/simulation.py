"""Cluster simulator: replays a trace through the live dispatcher and admission policy into simulated instances.

Event-driven and deterministic. prefill.py, decode.py and coupled.py have the instances, cluster.py the transfers between them. A Scenario
describes a simulation by names, for the command line and the benchmark.

Not modelled: reuse of output tokens by the next turn (the trace has them as blocks of its prompt), failures, preemption, and errors of the
scheduler's estimates other than interference.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from kvstore.kvcache.models.named import find_model
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab.simulator.cluster import Callbacks, make_cluster
from kvstore.lab.simulator.job import EventQueue, InstancePools, SimulatedJob
from kvstore.lab.simulator.plan import BLOCK_TOKENS, InstanceModel, SimulationPlan
from kvstore.lab.simulator.report import SimulationReport, SimulationSample, make_report
from kvstore.protocol.errors import ConfigError, TraceError
from kvstore.scheduler.admission import ADMISSIONS, AdmissionPolicy, make_admission
from kvstore.scheduler.baselines import make_dispatcher
from kvstore.scheduler.dispatcher import Dispatcher, Estimators
from kvstore.scheduler.estimators.analytic import DEFAULT_HBM_EFFICIENCY, DEFAULT_MFU, AnalyticModel, find_gpu
from kvstore.scheduler.estimators.interface import BandwidthTransfer
from kvstore.scheduler.request import Decision, Reason, Rejection, ScheduleRequest, Slo

MAX_SAMPLES: Final = 4096
"""Most load samples. Beyond it every second one is dropped and the interval doubled, because a trace may have pauses of years."""
LOAD_BYTES_PER_S: Final = 25e9
"""From DRAM to a GPU: what copies from pinned memory reach of PCIe 4.0 x16's 31.5 GB/s."""
BY_SLO: Final = "slo"
"""Admission in which only lines 18 and 19 of Algorithm 1 reject."""


class Simulation:
    """One run over one trace. Each run needs a new Simulation with its own dispatcher and admission policy."""

    def __init__(
        self,
        plan: SimulationPlan,
        machine: InstanceModel,
        dispatcher: Dispatcher,
        admission: AdmissionPolicy,
        *,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_progress` is called once for each request that is finished or rejected."""
        self.events = EventQueue()
        self.cluster = make_cluster(plan, machine, self.events, Callbacks(self._prefilled, self._ended))
        self.jobs: list[SimulatedJob] = []
        self._plan = plan
        self._machine = machine
        self._dispatcher = dispatcher
        self._admission = admission
        self._on_progress = on_progress
        self._pools = InstancePools(decode_instances=len(self.cluster.decoders))
        self._samples: list[SimulationSample] = []
        self._sample_s = plan.sample_s
        self._begin_ms = 0.0
        self._open = 0
        self._end_s = 0.0
        self._arrivals: Iterator[TraceRequest] = iter(())

    def run(self, requests: Iterable[TraceRequest]) -> SimulationReport:
        """Simulate all requests. Raises TraceError if they are not in order of time, and errors of `requests`."""
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
        request = ScheduleRequest(
            keys=found.hash_ids,
            input_tokens=max(1, found.input_length),
            block_tokens=BLOCK_TOKENS,
            output_tokens=max(1, found.output_length),
            slo=self._plan.enforced,
        )
        job = SimulatedJob(len(self.jobs), request, arrival_s, request.output_tokens)
        self.jobs.append(job)
        self._open += 1
        self.events.at(arrival_s, lambda: self._arrive(job))

    def _arrive(self, job: SimulatedJob) -> None:
        job.schedule_s = self._plan.decision_s
        self.events.at(job.arrival_s + job.schedule_s, lambda: self._decide(job))
        self._expect_next()

    def _decide(self, job: SimulatedJob) -> None:
        found = self._choose(job)
        if isinstance(found, Rejection):
            self._reject(job, found)
            return
        self._pools.taken(job, prefill_end_s=self.events.now_s + found.ttft_s)
        self.cluster.start(job, found)

    def _choose(self, job: SimulatedJob) -> Decision | Rejection:
        """Decide as the live scheduler: the dispatcher, then the admission policy."""
        capacity = self._machine.capacity_tokens
        if job.cache_tokens > capacity:
            return Rejection(Reason.CAPACITY, job.cache_tokens, capacity)
        cluster, request = self.cluster, job.request
        found = self._dispatcher.dispatch(request, cluster.match(request.keys), cluster.prefill_views(), cluster.decode_views())
        if isinstance(found, Rejection):
            return found
        load = self._pools.load(self.events.now_s)
        return self._admission.on_arrival(load, self._plan.slo, ttft_s=found.ttft_s) or found

    def _prefilled(self, job: SimulatedJob) -> bool:
        """Ask the admission policy whether the job may be decoded."""
        self._pools.prefilled(job)
        rejection = self._admission.on_decode(self._pools.load(self.events.now_s), self._plan.slo)
        if rejection is not None:
            self._reject(job, rejection)
            return False
        self._pools.decoded(job, now_s=self.events.now_s)
        return True

    def _ended(self, job: SimulatedJob) -> None:
        job.decode_s = job.finish_s - job.first_token_s - job.stream_s
        self._pools.ended(job, now_s=self.events.now_s)
        self._close()

    def _reject(self, job: SimulatedJob, rejection: Rejection) -> None:
        job.rejection = rejection
        self._close()

    def _close(self) -> None:
        self._open -= 1
        self._end_s = self.events.now_s
        self._on_progress()

    def _sample(self) -> None:
        """Sample the load of the pools, and schedule the next sample while jobs are open."""
        if not self._open:
            return
        waits = [server.queue_s() for server in self.cluster.prompters]
        batches = [(len(loop.batch), loop.context_tokens()) for loop in self.cluster.loops]
        steps_s = [self._machine.tbt_s(size, context) if size else 0.0 for size, context in batches]
        self._samples.append(
            SimulationSample(
                self.events.now_s,
                sum(waits) / len(waits),
                sum(steps_s) / len(steps_s),
            )
        )
        if len(self._samples) >= MAX_SAMPLES:
            del self._samples[1::2]
            self._sample_s *= 2
        self.events.at(self.events.now_s + self._sample_s, self._sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All inputs of a simulation except the trace."""

    plan: SimulationPlan = SimulationPlan()
    """`enforced` follows from `admission`."""
    model: str = "llama2-70b"
    gpu: str = "A800"
    gpus: int = 8
    """Per instance."""
    mfu: float = DEFAULT_MFU
    hbm_efficiency: float = DEFAULT_HBM_EFFICIENCY
    send_bytes_per_s: float | None = None
    """All rails of an instance together; None: by the GPU's usual NIC."""
    load_bytes_per_s: float = LOAD_BYTES_PER_S
    """From DRAM to one GPU."""
    dispatcher: str = "kvcache_centric"
    threshold: float = 1.0
    admission: str = BY_SLO
    load_limit: float = 1.0
    """Share of an SLO up to which the admission policy loads a pool."""
    seed: int = 0

    def machine(self) -> InstanceModel:
        """Return the model of an instance. Raises ConfigError for an unknown model or GPU, or a model that does not fit."""
        model, gpu = find_model(self.model), find_gpu(self.gpu)
        times = AnalyticModel(model, gpu, gpus=self.gpus, mfu=self.mfu, hbm_efficiency=self.hbm_efficiency)
        return InstanceModel(
            times=times,
            layers=model.layers,
            kv_bytes_per_token=model.kv_bytes_per_token,
            capacity_tokens=times.cache_tokens,
            peak_flops_per_s=times.peak_flops_per_s,
            send_bytes_per_s=gpu.nic_bytes_per_s * self.gpus if self.send_bytes_per_s is None else self.send_bytes_per_s,
            load_bytes_per_s=self.load_bytes_per_s * self.gpus,
        )

    def simulation(self, *, on_progress: Callable[[], None] = lambda: None) -> Simulation:
        """Create a new simulation. Raises ConfigError for an unknown name, InvalidArgument for values out of range."""
        machine = self.machine()
        estimators = Estimators(machine, machine, BandwidthTransfer(), BLOCK_TOKENS * machine.kv_bytes_per_token)
        dispatcher = make_dispatcher(self.dispatcher, estimators, threshold=self.threshold, seed=self.seed)
        is_by_slo = self.admission == BY_SLO
        if not is_by_slo and self.admission not in ADMISSIONS:
            raise ConfigError(f"admission is {self.admission!r}: it must be one of {', '.join((BY_SLO, *ADMISSIONS))}")
        admission = make_admission("all" if is_by_slo else self.admission, machine, load_limit=self.load_limit)
        plan = replace(self.plan, enforced=self.plan.slo if is_by_slo else Slo())
        return Simulation(plan, machine, dispatcher, admission, on_progress=on_progress)

    def run(self, requests: Iterable[TraceRequest], *, on_progress: Callable[[], None] = lambda: None) -> SimulationReport:
        """Simulate the requests. Raises as `simulation`, and TraceError if they are not in order of time."""
        return self.simulation(on_progress=on_progress).run(requests)
