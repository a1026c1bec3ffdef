"""A simulation described by names: of a model, a GPU, a dispatcher, an admission policy. What the command line and the benchmark run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from kvstore.kvcache.models.named import find_model
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.protocol.errors import ConfigError
from kvstore.scheduler.admission import ADMISSIONS, make_admission
from kvstore.scheduler.baselines import make_dispatcher
from kvstore.scheduler.dispatcher import Estimators
from kvstore.scheduler.estimators.analytic import DEFAULT_HBM_EFFICIENCY, DEFAULT_MFU, AnalyticModel
from kvstore.scheduler.estimators.gpus import find_gpu
from kvstore.scheduler.estimators.transfer_time import BandwidthTransfer
from kvstore.scheduler.request import Slo
from kvstore.scheduler.simulator.machine import Machine
from kvstore.scheduler.simulator.plan import BLOCK_TOKENS, Plan
from kvstore.scheduler.simulator.report import Report
from kvstore.scheduler.simulator.simulation import Simulation

LOAD_BYTES_PER_S: Final = 25e9
"""From DRAM to a GPU over PCIe 4.0 x16: of 31.5 GB/s what copies from pinned memory reach."""
BY_SLO: Final = "slo"
"""The admission by which nothing but Algorithm 1's own lines 18 and 19 reject."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything a simulation needs but the trace."""

    plan: Plan = Plan()
    """`enforced` follows from `admission`."""
    model: str = "llama2-70b"
    gpu: str = "A800"
    gpus: int = 8
    """Of each instance."""
    mfu: float = DEFAULT_MFU
    hbm_efficiency: float = DEFAULT_HBM_EFFICIENCY
    send_bytes_per_s: float | None = None
    """Of all rails of an instance; None: what its GPUs' network cards usually are."""
    load_bytes_per_s: float = LOAD_BYTES_PER_S
    """From DRAM to each GPU."""
    dispatcher: str = "kvcache_centric"
    threshold: float = 1.0
    admission: str = BY_SLO
    load_limit: float = 1.0
    """Share of an SLO that the admission policy lets a pool be loaded to."""
    seed: int = 0

    def machine(self) -> Machine:
        """One instance. Raises ConfigError for an unknown model or GPU, or a model that does not fit."""
        model, gpu = find_model(self.model), find_gpu(self.gpu)
        times = AnalyticModel(model, gpu, gpus=self.gpus, mfu=self.mfu, hbm_efficiency=self.hbm_efficiency)
        return Machine(
            times=times,
            layers=model.layers,
            kv_bytes_per_token=model.kv_bytes_per_token,
            capacity_tokens=times.cache_tokens,
            peak_flops_per_s=times.peak_flops_per_s,
            send_bytes_per_s=gpu.nic_bytes_per_s * self.gpus if self.send_bytes_per_s is None else self.send_bytes_per_s,
            load_bytes_per_s=self.load_bytes_per_s * self.gpus,
        )

    def simulation(self, *, on_progress: Callable[[], None] = lambda: None) -> Simulation:
        """A new one. Raises ConfigError for an unknown name, InvalidArgument for a figure out of range."""
        machine = self.machine()
        estimators = Estimators(machine, machine, BandwidthTransfer(), BLOCK_TOKENS * machine.kv_bytes_per_token)
        dispatcher = make_dispatcher(self.dispatcher, estimators, threshold=self.threshold, seed=self.seed)
        is_by_slo = self.admission == BY_SLO
        if not is_by_slo and self.admission not in ADMISSIONS:
            raise ConfigError(f"no admission is named {self.admission!r}: take one of {', '.join((BY_SLO, *ADMISSIONS))}")
        admission = make_admission("all" if is_by_slo else self.admission, machine, load_limit=self.load_limit)
        plan = replace(self.plan, enforced=self.plan.slo if is_by_slo else Slo())
        return Simulation(plan, machine, dispatcher, admission, on_progress=on_progress)

    def run(self, requests: Iterable[TraceRequest], *, on_progress: Callable[[], None] = lambda: None) -> Report:
        """Simulate. Raises as `simulation` does, and TraceError for a trace that is not in order of time."""
        return self.simulation(on_progress=on_progress).run(requests)
