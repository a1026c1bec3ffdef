"""Setups to plan: small, and quick to simulate."""

from typing import Any

from kvstore.cli.tools.capacity_plan import PlanInputs
from kvstore.kvcache.codecs.schemes import CacheScheme
from kvstore.kvcache.models.named import find_model
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.lab.pressure.load import UserLoad
from kvstore.lab.pressure.strategies import LowerTier
from kvstore.scheduler.estimators.analytic import find_gpu

GB = 10**9


def setup(
    model: str = "llama3-70b",
    *,
    gpu: str = "H100",
    scheme: str = "none",
    block_tokens: int = 64,
    load: UserLoad | None = None,
    **changed: Any,
) -> PlanInputs:
    """Two GPUs, DRAM and NVMe, unless told otherwise."""
    facts = find_model(model)
    defaults = {
        "model": facts,
        "gpu": find_gpu(gpu),
        "spec": CacheSpec.of_model(facts, block_tokens=block_tokens, scheme=CacheScheme.parse(scheme)),
        "load": load or UserLoad(users=12, context_tokens=5000, output_tokens=100, duration_s=60),
        "lower_tiers": [
            LowerTier(name="DRAM", capacity_bytes=160 * GB, bytes_per_s=50e9),
            LowerTier(name="NVMe", capacity_bytes=1600 * GB, bytes_per_s=1e9),
        ],
        "nic_bytes_per_s": 100e9,
        "tp": 2,
    }
    return PlanInputs(**{**defaults, **changed})
