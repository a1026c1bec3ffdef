"""Shape of a language model: the numbers that decide its compute, weights and cache. named.py has a table of models.

Facts come from that table, from a JSON file with the fields of ModelFacts, or from a Hugging Face config.json
(hf_config.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.kvcache.models.hf_config import is_config, model_fields
from kvstore.kvcache.models.table import DTYPE_BYTES, check_above_zero, facts_of, read_object
from kvstore.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA): keys and values are computed from one latent vector a token, which alone is
    cached.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1. A head's query and key have head_dim elements, of which the last
    `rope_dim` are rotary; the key's rotary part is shared by all heads and cached beside the latent vector.
    """

    kv_rank: int
    """Elements of the latent vector: d_c, kv_lora_rank."""
    rope_dim: int
    """Elements of the rotary part: d_h^R, qk_rope_head_dim."""
    value_dim: int
    """Elements of a head's value."""
    query_rank: int = 0
    """Rank of the compressed query; 0: queries are not compressed."""

    def __post_init__(self) -> None:
        check_above_zero(self, may_be_zero=frozenset({"query_rank"}))

    @property
    def cached_dim(self) -> int:
        """Elements that a layer caches per token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Sliding-window attention: layers that attend to the last tokens only."""

    tokens: int
    """Tokens that a token attends to, itself included."""
    layers: int
    """Number of windowed layers."""

    def __post_init__(self) -> None:
        check_above_zero(self)


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts: feed-forward networks of which a router selects a few for each token."""

    count: int
    active: int
    """Experts per token."""
    ffn: int
    """Width of one expert."""
    shared_ffn: int = 0
    """Total width of the shared experts, which every token uses."""
    dense_layers: int = 0
    """Layers with an ordinary feed-forward network."""

    def __post_init__(self) -> None:
        check_above_zero(self, may_be_zero=frozenset({"shared_ffn", "dense_layers"}))
        if self.active > self.count:
            raise ConfigError(f"active is {self.active}: there are only {self.count} experts")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Shape of one model. Parameters count matrices only: biases, norms and learnt positions are 1 % of the smallest
    model and far less of others.

    Raises:
        ConfigError: a number is not above 0, or two contradict each other.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Heads of keys and values: `heads` without grouped-query attention. Unused with latent attention."""
    head_dim: int
    ffn: int
    """Width of the feed-forward network; with experts, of the dense layers."""
    vocab: int
    is_gated: bool = True
    """The feed-forward network has three matrices (SwiGLU) instead of two."""
    is_tied: bool = False
    """The embedding's matrix also computes the logits."""
    dtype: str = "bfloat16"
    """Of an element of the cache and, without weight_bits, of a weight."""
    weight_bits: int = 0
    """Of a quantised weight of the layers (embedding and logits are not quantised); 0: those of `dtype`."""
    latent: LatentAttention | None = None
    window: SlidingWindow | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        check_above_zero(self, may_be_zero=frozenset({"weight_bits"}))
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype is {self.dtype!r}: take one of {', '.join(DTYPE_BYTES)}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads is {self.heads}: it must be a multiple of kv_heads, {self.kv_heads}")
        for name, layers in (
            ("window.layers", self.window and self.window.layers),
            ("dense_layers", self.experts and self.experts.dense_layers),
        ):
            if layers and layers > self.layers:
                raise ConfigError(f"{name} is {layers}: there are only {self.layers} layers")
        if self.latent and self.latent.rope_dim >= self.head_dim:
            raise ConfigError(f"rope_dim is {self.latent.rope_dim}: it is a part of head_dim, {self.head_dim}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, name: str = "") -> "ModelFacts":
        """Return the model of a Hugging Face configuration; `name`: its name, unless the configuration has one.

        Raises:
            ConfigError: a required field is missing, or a value is not supported.
        """
        fields = model_fields(config, name=name)
        return facts_of(fields, cls, what=f"the configuration of {fields['name']}")

    @classmethod
    def from_file(cls, path: Path) -> "ModelFacts":
        """Return the model in a JSON file: a Hugging Face config.json, or an object with the fields of ModelFacts.

        Raises:
            ConfigError: the file cannot be read, or is neither.
        """
        found = read_object(path, noun="model")
        if is_config(found):
            # A config.json is in a directory named after the model.
            return cls.from_config(found, name=path.absolute().parent.name if path.stem == "config" else path.stem)
        return facts_of(found, cls, what=f"the model in {path}")

    @property
    def specials(self) -> tuple[str, ...]:
        """Features beyond a dense model with a key and a value per token and KV head; usually empty."""
        parts = {"latent attention": self.latent, "a sliding window": self.window, "a mixture of experts": self.experts}
        return tuple(name for name, part in parts.items() if part)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of the cache."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV cache in all layers: a key and a value for each KV head, or one latent vector."""
        elements = self.latent.cached_dim if self.latent else 2 * self.kv_heads * self.head_dim
        return self.layers * elements * self.dtype_bytes

    @property
    def ffn_matrices(self) -> int:
        """Matrices of one layer's feed-forward network."""
        return 3 if self.is_gated else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's projections."""
        if self.latent is None:
            return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        mla, head_dim = self.latent, self.head_dim
        queries = mla.query_rank * (self.hidden + self.heads * head_dim) if mla.query_rank else self.hidden * self.heads * head_dim
        keys_and_values = self.hidden * mla.cached_dim + mla.kv_rank * self.heads * (head_dim - mla.rope_dim + mla.value_dim)
        return queries + keys_and_values + self.heads * mla.value_dim * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers."""
        width = self.ffn_matrices * self.hidden
        dense_layers, sparse_layer = self.layers, 0
        if self.experts:
            router, experts = self.hidden * self.experts.count, self.experts.count * self.experts.ffn + self.experts.shared_ffn
            dense_layers, sparse_layer = self.experts.dense_layers, router + width * experts
        return self.layers * self.attention_parameters + dense_layers * width * self.ffn + (self.layers - dense_layers) * sparse_layer

    @property
    def embedding_parameters(self) -> int:
        """Parameters of embedding and logits."""
        return (1 if self.is_tied else 2) * self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of all matrices."""
        return self.layer_parameters + self.embedding_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices: of the layers, the embedding and the logits."""
        layer_bits = self.weight_bits or 8 * self.dtype_bytes
        return self.layer_parameters * layer_bits // 8 + self.embedding_parameters * self.dtype_bytes
