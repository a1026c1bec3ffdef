"""Named language models: the shapes that decide how much they compute, load and cache. Facts; analytic.py makes times of them.

A model here is dense (no mixture of experts) and keeps keys and values for each of its KV heads (no latent attention, no sliding window).

Source: each model's published configuration (config.json on huggingface.co), and: Touvron et al., "Llama 2", arXiv:2307.09288, table 1;
Grattafiori et al., "The Llama 3 Herd of Models", arXiv:2407.21783, table 3; Jiang et al., "Mistral 7B", arXiv:2310.06825, table 1 (v0.3
has a larger vocabulary); "Qwen2.5 Technical Report", arXiv:2412.15115, table 1; Zhang et al., "OPT", arXiv:2205.01068, table 1; Brown et
al., "Language Models are Few-Shot Learners", arXiv:2005.14165, table 2.1 (GPT-3 175B).
"""

from dataclasses import dataclass
from typing import Final

from kvstore.kvcache.facts import check_above_zero, find_facts
from kvstore.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The shape of one model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Heads that keys and values have: `heads` without grouped-query attention."""
    head_dim: int
    ffn: int
    """Width inside the feed-forward network."""
    vocab: int
    is_gated: bool = True
    """The feed-forward network has three matrices (SwiGLU), not two."""
    dtype_bytes: int = 2
    """Of a weight, and of an element of the cache."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a figure that is not above 0, or heads that cannot share their keys and values evenly."""
        check_above_zero(self)
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads is {self.heads}: it must be a multiple of kv_heads, {self.kv_heads}")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache of one token in all layers: a key and a value for each KV head."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def ffn_matrices(self) -> int:
        """Matrices of the feed-forward network of a layer."""
        return 3 if self.is_gated else 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices: of the layers, the embedding and the logits (counted apart, also where a model ties them)."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        layer = attention + self.ffn_matrices * self.hidden * self.ffn
        return (self.layers * layer + 2 * self.vocab * self.hidden) * self.dtype_bytes


MODELS: Final[dict[str, ModelFacts]] = {
    facts.name: facts
    for facts in (
        ModelFacts("llama2-7b", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000),
        ModelFacts("llama2-13b", layers=40, hidden=5120, heads=40, kv_heads=40, head_dim=128, ffn=13824, vocab=32000),
        ModelFacts("llama2-70b", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=32000),
        ModelFacts("llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256),
        ModelFacts("llama3-70b", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256),
        ModelFacts("llama3-405b", layers=126, hidden=16384, heads=128, kv_heads=8, head_dim=128, ffn=53248, vocab=128256),
        ModelFacts("mistral-7b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32768),
        ModelFacts("qwen2.5-7b", layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, ffn=18944, vocab=152064),
        ModelFacts("qwen2.5-72b", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=29568, vocab=152064),
        ModelFacts("opt-6.7b", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=16384, vocab=50272, is_gated=False),
        ModelFacts("gpt-3", layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=49152, vocab=50257, is_gated=False),
    )
}


def find_model(name: str) -> ModelFacts:
    """The model of this name (case does not matter), or that in the file `name` if it ends in .json: an object with the fields of
    ModelFacts.

    Raises:
        ConfigError: there is none of this name (the message lists those there are), or the file is not such an object.
    """
    return find_facts(name, MODELS, ModelFacts, noun="model")
