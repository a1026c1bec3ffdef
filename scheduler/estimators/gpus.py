"""Named GPUs: what they compute and move at best. Facts; what is reached of them is `mfu` and `hbm_efficiency` of analytic.py.

Source: NVIDIA's data sheets of each (figures "with sparsity" halved; NVLink is given there for both directions together, here for one). The
data sheet of none names a network card: DGX A100 has 8 x 200 Gbit/s for 8 GPUs, DGX H100, H200 and B200 have 8 x 400; the testbed of Qin et
al., "Mooncake", FAST 2025, has 4 x 200 for 8 A800; 100 Gbit/s a GPU are assumed of the others. A800 and H800 differ from A100 and H100 in
NVLink. RTX4090: NVIDIA, "Ada GPU Architecture" white paper, appendix A (FP16 with FP32 accumulation).
"""

from dataclasses import dataclass
from typing import Final

from kvstore.kvcache.models.table import check_above_zero, find_facts


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU, of the SXM form where there are several."""

    name: str
    flops_per_s: float
    """Dense FP16 or BF16 on tensor cores, FP32 accumulation."""
    hbm_bytes_per_s: float
    hbm_bytes: int
    """Of its memory, also where that is GDDR."""
    nvlink_bytes_per_s: float
    """To the other GPUs of its host, one direction; 0: it has no NVLink."""
    nic_bytes_per_s: float
    """Its share of the network cards that its hosts usually have, one direction."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a figure that cannot be."""
        check_above_zero(self, may_be_zero=frozenset({"nvlink_bytes_per_s"}))


GB: Final = 10**9

GPUS: Final[dict[str, GpuFacts]] = {
    facts.name: facts
    for facts in (
        GpuFacts("A40", 149.7e12, 696e9, 48 * GB, nvlink_bytes_per_s=56.25e9, nic_bytes_per_s=12.5e9),
        GpuFacts("A100-80G", 312e12, 2039e9, 80 * GB, nvlink_bytes_per_s=300e9, nic_bytes_per_s=25e9),
        GpuFacts("A800-80G", 312e12, 2039e9, 80 * GB, nvlink_bytes_per_s=200e9, nic_bytes_per_s=12.5e9),
        GpuFacts("L4", 121e12, 300e9, 24 * GB, nvlink_bytes_per_s=0, nic_bytes_per_s=12.5e9),
        GpuFacts("L40S", 362e12, 864e9, 48 * GB, nvlink_bytes_per_s=0, nic_bytes_per_s=12.5e9),
        GpuFacts("RTX4090", 165.2e12, 1008e9, 24 * GB, nvlink_bytes_per_s=0, nic_bytes_per_s=12.5e9),
        GpuFacts("H100", 989.5e12, 3350e9, 80 * GB, nvlink_bytes_per_s=450e9, nic_bytes_per_s=50e9),
        GpuFacts("H800", 989.5e12, 3350e9, 80 * GB, nvlink_bytes_per_s=200e9, nic_bytes_per_s=50e9),
        GpuFacts("H200", 989.5e12, 4800e9, 141 * GB, nvlink_bytes_per_s=450e9, nic_bytes_per_s=50e9),
        GpuFacts("B200", 2250e12, 7700e9, 180 * GB, nvlink_bytes_per_s=900e9, nic_bytes_per_s=50e9),
    )
}

SHORT_NAMES: Final = {"a100": "A100-80G", "a800": "A800-80G"}
"""Names without the size of a memory that comes in two: the larger is meant."""


def find_gpu(name: str) -> GpuFacts:
    """The GPU of this name (case does not matter), or that in the file `name` if it ends in .json: an object with the fields of GpuFacts.

    Raises:
        ConfigError: there is none of this name (the message lists those there are), or the file is not such an object.
    """
    return find_facts(SHORT_NAMES.get(name.lower(), name), GPUS, GpuFacts, noun="GPU")
