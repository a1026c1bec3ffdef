"""Analytic times of prefill and decode steps, from the shapes of a model and the limits of a GPU (roofline); and a
table of GPUs.

Each operation takes the longer of its compute time and its loads from HBM; operations run one after another. The four
operations of a layer and their counts are those of the published layer model (table in docs/scheduling.md),
generalised: grouped-query attention, a gated feed-forward network, a cached prefix, causal attention (half of the
pairs), and the logits, once per step. There an operation is a multiply-accumulate, here it is two. Models with experts,
latent attention or sliding windows are not covered.

GPU figures are peak values; `mfu` and `hbm_efficiency` scale them to what is reached.

Source: the layer model presented with Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025.
Roofline: Williams et al., "Roofline", CACM 52 (2009). GPUs: NVIDIA's data sheets (figures "with sparsity" halved;
NVLink is given there for both directions, here for one). Network cards: DGX A100 has 8 x 200 Gbit/s for 8 GPUs, DGX
H100, H200 and B200 have 8 x 400; the testbed of Qin et al. has 4 x 200 for 8 A800; others are assumed to have 100
Gbit/s per GPU. A800 and H800 differ from A100 and H100 in NVLink. RTX4090: NVIDIA, "Ada GPU Architecture" white paper,
appendix A (FP16 with FP32 accumulation).
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.kvcache.models.facts import ModelFacts
from kvstore.kvcache.models.table import check_above_zero, find_facts
from kvstore.protocol.errors import ConfigError

DEFAULT_MFU: Final = 0.5
"""Share of the peak that large matrix products reach with tensor parallelism over NVLink, including all-reduces. To be
fitted."""
MIN_EFFICIENCY: Final = 1e-6
"""Lower bound of both efficiencies."""
DEFAULT_HBM_EFFICIENCY: Final = 0.8
"""Share of the bandwidth that loads of weights and cache reach. The A40 tables of the layer model give 0.75 to 0.8."""
USED_HBM: Final = 0.9
"""Share of the memory for weights and cache; the rest is for activations and the runtime. vLLM's default, too."""
OPERATIONS: Final = ("qkv", "prefill_attention", "decode_attention", "output", "ffn", "logits")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU, in its SXM form if there are several."""

    name: str
    flops_per_s: float
    """Dense FP16 or BF16 on tensor cores, FP32 accumulation."""
    hbm_bytes_per_s: float
    hbm_bytes: int
    """Size of its memory, also if it is GDDR."""
    nvlink_bytes_per_s: float
    """To the other GPUs of its host, one direction; 0: no NVLink."""
    nic_bytes_per_s: float
    """Its share of its host's typical network cards, one direction."""

    def __post_init__(self) -> None:
        """Raises ConfigError for impossible figures."""
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
"""Names without a memory size, of GPUs with two: the larger is meant."""


def find_gpu(name: str) -> GpuFacts:
    """The GPU of this name (case-insensitive), or from the file `name` if it ends in .json: an object with the fields
    of GpuFacts.

    Raises:
        ConfigError: unknown name (the message lists the known ones), or a malformed file.
    """
    return find_facts(SHORT_NAMES.get(name.lower(), name), GPUS, GpuFacts, noun="GPU")


class StepOperation(NamedTuple):
    """One operation of a step, over all layers."""

    name: str
    flops: float
    """Two per multiply-accumulate."""
    load_bytes: float
    """Read from HBM."""
    seconds: float


class AnalyticModel:
    """PrefillTime and DecodeTime of `gpus` GPUs that hold one copy of the model (tensor parallel).

    A step computes new tokens of one prompt and one token of each of `batch` sequences. With batch = 0 it is a prefill,
    with new_tokens = 0 a decode step, with both a step of chunked prefill, which loads the weights once.
    """

    def __init__(
        self,
        model: ModelFacts,
        gpu: GpuFacts,
        *,
        gpus: int = 1,
        mfu: float = DEFAULT_MFU,
        hbm_efficiency: float = DEFAULT_HBM_EFFICIENCY,
    ) -> None:
        """`mfu`: share of peak compute that compute-bound operations reach; `hbm_efficiency`: share of the bandwidth
        that memory-bound ones reach.

        Raises:
            ConfigError: one is not within [MIN_EFFICIENCY, 1], or the model does not fit on the GPUs or is not covered.
        """
        if model.specials:
            raise ConfigError(
                f"{model.name} has {' and '.join(model.specials)}, which the layer model does not cover: use a dense model that keeps "
                "all keys and values, or times measured on an engine"
            )
        for name, value in (("mfu", mfu), ("hbm_efficiency", hbm_efficiency)):
            if not MIN_EFFICIENCY <= value <= 1:
                raise ConfigError(f"{name} is {value:g}: it must be from {MIN_EFFICIENCY:g} to 1")
        if gpus < 1:
            raise ConfigError(f"gpus is {gpus}: it must be at least 1")
        self.model, self.gpu, self.gpus = model, gpu, gpus
        cache_bytes = int(gpus * gpu.hbm_bytes * USED_HBM) - model.weight_bytes
        if cache_bytes < model.kv_bytes_per_token:
            fitting = -int(-(model.weight_bytes + model.kv_bytes_per_token) // (gpu.hbm_bytes * USED_HBM))
            raise ConfigError(f"{model.name} does not fit on {gpus} x {gpu.name}: it needs at least {fitting} of them")
        self.cache_tokens = cache_bytes // model.kv_bytes_per_token
        """Tokens of KV cache that fit in HBM beside the weights."""
        self.peak_flops_per_s = gpus * gpu.flops_per_s
        """The MFU of a step is its flops / (its seconds x this)."""
        self._flops_per_s = self.peak_flops_per_s * mfu
        self._load_bytes_per_s = gpus * gpu.hbm_bytes_per_s * hbm_efficiency
        self._query_bytes = model.layers * model.heads * model.head_dim * model.dtype_bytes
        self._pair_flops = 4 * model.layers * model.heads * model.head_dim
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        layer_bits, logit_bits = model.weight_bits or 8 * model.dtype_bytes, 8 * model.dtype_bytes
        self._qkv = self._product(model.hidden, queries + 2 * keys, times=model.layers, bits=layer_bits)
        self._output = self._product(queries, model.hidden, times=model.layers, bits=layer_bits)
        self._ffn = self._product(model.hidden, model.ffn_matrices * model.ffn, times=model.layers, bits=layer_bits)
        self._logits = self._product(model.hidden, model.vocab, times=1, bits=logit_bits)
        self._layer_products = tuple(product.seconds for product in (self._qkv, self._output, self._ffn))

    def _product(self, rows: int, columns: int, *, times: int, bits: int) -> "_Product":
        """`bits` per weight. Vectors and products have the model's dtype: quantised weights are decoded on load."""
        elements = rows * columns * times
        flops, matrix_bytes, vector_bytes = 2 * elements, elements * bits // 8, rows * self.model.dtype_bytes * times
        rate = self._load_bytes_per_s
        return _Product(flops, matrix_bytes, vector_bytes, (flops / self._flops_per_s, matrix_bytes / rate, vector_bytes / rate))

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        """Seconds to compute a prompt alone, in one step."""
        return self.step_s(new_tokens=input_tokens - prefix_tokens, prefix_tokens=prefix_tokens, batch=0, context_tokens=0)

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        """Seconds for one token of each of `batch` sequences with `context_tokens` of cache in total."""
        return self.step_s(new_tokens=0, prefix_tokens=0, batch=batch, context_tokens=context_tokens)

    def step_s(self, *, new_tokens: int, prefix_tokens: int, batch: int, context_tokens: int) -> float:
        """Seconds of a step that computes the tokens [prefix_tokens, prefix_tokens + new_tokens) of a prompt and
        decodes `batch` sequences with `context_tokens` of cache in total; 0 without work."""
        # The sum of operations() without creating them: a decision over 256 instances needs 512 estimates within 2 ms.
        tokens = new_tokens + batch
        if not tokens:
            return 0.0
        sequences = batch
        seconds = 0.0
        for compute_s, matrix_s, vector_s in self._layer_products:
            computing_s, loading_s = compute_s * tokens, matrix_s + vector_s * tokens
            seconds += computing_s if computing_s > loading_s else loading_s
        if new_tokens:
            sequences += 1
            seconds += self._bound_s(*self._prefill_attention(new_tokens, prefix_tokens))
        if batch:
            seconds += self._bound_s(*self._decode_attention(batch, context_tokens))
        compute_s, matrix_s, vector_s = self._logits.seconds
        return seconds + max(compute_s * sequences, matrix_s + vector_s * sequences)

    def operations(self, *, new_tokens: int, prefix_tokens: int, batch: int, context_tokens: int) -> tuple[StepOperation, ...]:
        """Parts of step_s, in the order of OPERATIONS; () without work."""
        tokens, sequences = new_tokens + batch, batch + (new_tokens > 0)
        if not tokens:
            return ()
        counts = (
            self._qkv.counts(tokens),
            self._prefill_attention(new_tokens, prefix_tokens),
            self._decode_attention(batch, context_tokens),
            self._output.counts(tokens),
            self._ffn.counts(tokens),
            self._logits.counts(sequences),
        )
        return tuple(
            StepOperation(name, flops, load_bytes, self._bound_s(flops, load_bytes))
            for name, (flops, load_bytes) in zip(OPERATIONS, counts, strict=True)
        )

    def prefill_flops(self, input_tokens: int, prefix_tokens: int) -> float:
        """Floating point operations of a prefill."""
        step = self.operations(new_tokens=input_tokens - prefix_tokens, prefix_tokens=prefix_tokens, batch=0, context_tokens=0)
        return sum(operation.flops for operation in step)

    def decode_flops(self, batch: int, context_tokens: int) -> float:
        """Floating point operations of a decode step."""
        step = self.operations(new_tokens=0, prefix_tokens=0, batch=batch, context_tokens=context_tokens)
        return sum(operation.flops for operation in step)

    def _prefill_attention(self, new: int, prefix: int) -> tuple[int, int]:
        """Flops, and bytes of queries, keys and values. A token attends to all before it and to itself."""
        if not new:
            return 0, 0
        pairs = new * prefix + new * (new + 1) // 2
        return self._pair_flops * pairs, self._query_bytes * new + self.model.kv_bytes_per_token * (prefix + new)

    def _decode_attention(self, batch: int, context: int) -> tuple[int, int]:
        return self._pair_flops * context, self._query_bytes * batch + self.model.kv_bytes_per_token * context

    def _bound_s(self, flops: float, load_bytes: float) -> float:
        return max(flops / self._flops_per_s, load_bytes / self._load_bytes_per_s)


class _Product(NamedTuple):
    """Vectors times a matrix, over all layers."""

    flops: int
    """Per vector."""
    matrix_bytes: int
    vector_bytes: int
    seconds: tuple[float, float, float]
    """Seconds for each of these three."""

    def counts(self, vectors: int) -> tuple[int, int]:
        """(flops, bytes loaded)."""
        return self.flops * vectors, self.matrix_bytes + self.vector_bytes * vectors
