"""Shape of a model's KV cache, and all sizes that follow from it. layout.py places the bytes.

A cache keeps, for each of `layers` layers and each token, a key and a value of `head_dim` elements for each of
`kv_heads` heads. With latent attention (MLA) it keeps one vector instead of both, which all query heads share. It is
split into blocks of `block_tokens` tokens.

Source of the formulas: a token 2 L hkv d s, a sequence of T tokens that times T, a batch the sum over its sequences:
Pope et al., "Efficiently Scaling Transformer Inference", arXiv:2211.05102, section 2.1. A rolling window of W tokens:
Jiang et al., "Mistral 7B", arXiv:2310.06825, section 2. MLA's d_c + d_h^R elements: DeepSeek-V2, arXiv:2405.04434,
table 1.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from kvstore.kvcache.codecs.schemes import NONE, CacheScheme
from kvstore.kvcache.models.facts import ModelFacts
from kvstore.kvcache.models.named import find_model
from kvstore.kvcache.models.table import dtype_bytes
from kvstore.protocol.errors import InvalidArgument

DEFAULT_BLOCK_TOKENS: Final = 16
MAX_COUNT: Final = 1 << 20
"""Limit of layers, heads and tokens of a block: larger numbers are mistakes, and would overflow 64-bit offsets."""


class Attention(StrEnum):
    """Sharing of keys and values among query heads."""

    MHA = "mha"
    """Each has its own."""
    GQA = "gqa"
    """Groups of them share."""
    MQA = "mqa"
    """All share one key and one value."""
    MLA = "mla"
    """All share one latent vector, from which keys and values are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Shape of a KV cache. Engines whose specs differ only in `model` store the same bytes for the same values.

    Raises:
        InvalidArgument: a field is outside its range, or `scheme` cannot encode blocks of this shape.
    """

    layers: int
    kv_heads: int
    """1 with MLA."""
    head_dim: int
    """Elements of one key, and of one value; with MLA of latent and rotary part together (kv_lora_rank +
    qk_rope_head_dim)."""
    heads: int = 0
    """Query heads, a multiple of kv_heads; 0: same as kv_heads."""
    dtype: str = "bfloat16"
    """Of an element before quantisation: a name of table.DTYPE_BYTES."""
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    attention: Attention | None = None
    """None: derived from heads and kv_heads (never MLA, which must be given)."""
    scheme: CacheScheme = NONE
    window_tokens: int = 0
    """Tokens that a windowed layer needs; 0: no windowed layers."""
    windowed_layers: int = 0
    model: str = ""
    """Name for people, and for errors of peers that disagree. Does not affect sizes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is int:
                self._check_count(field.name, lowest=int(field.name in ("layers", "kv_heads", "head_dim", "block_tokens")))
        dtype_bytes(self.dtype)
        if self.heads == 0:
            object.__setattr__(self, "heads", self.kv_heads)
        if self.heads % self.kv_heads:
            raise InvalidArgument(f"heads is {self.heads}: it must be a multiple of kv_heads, {self.kv_heads}")
        self._settle_attention()
        if (self.window_tokens > 0) != (self.windowed_layers > 0) or self.windowed_layers > self.layers:
            raise InvalidArgument(
                f"window_tokens is {self.window_tokens} and windowed_layers {self.windowed_layers}: "
                f"both must be 0 or both above 0, and there are {self.layers} layers"
            )
        for is_key in self.kinds:
            self.scheme.of(is_key).check(is_key, tokens=self.block_tokens, head_dim=self.head_dim)

    def _check_count(self, name: str, *, lowest: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or not lowest <= value <= MAX_COUNT:
            raise InvalidArgument(f"{name} is {value!r}: it must be a whole number from {lowest} to {MAX_COUNT}")

    def _settle_attention(self) -> None:
        if self.attention is Attention.MLA:
            if self.kv_heads != 1:
                raise InvalidArgument(f"kv_heads is {self.kv_heads}: with latent attention (mla) it is 1, a vector that all heads share")
            return
        derived = Attention.MHA if self.heads == self.kv_heads else Attention.MQA if self.kv_heads == 1 else Attention.GQA
        if self.attention not in (None, derived):
            raise InvalidArgument(
                f"attention is {self.attention!s}, but {self.heads} heads with {self.kv_heads} KV heads are {derived}: leave it out"
            )
        object.__setattr__(self, "attention", derived)

    @classmethod
    def named(cls, name: str, *, block_tokens: int = DEFAULT_BLOCK_TOKENS, dtype: str = "", scheme: CacheScheme = NONE) -> "CacheSpec":
        """Return the cache of the model `name` of named.py, or of the file `name` if it ends in .json (see find_model).

        `dtype`: of the elements; "": that of the model.

        Raises:
            ConfigError: no such model, or an invalid file.
            InvalidArgument: an argument is out of range.
        """
        return cls.of_model(find_model(name), block_tokens=block_tokens, dtype=dtype, scheme=scheme)

    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any],
        *,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        dtype: str = "",
        scheme: CacheScheme = NONE,
    ) -> "CacheSpec":
        """Return the cache of a Hugging Face model: from the path of a config.json, or from its contents.

        Raises:
            ConfigError: the file cannot be read, or is incomplete or unsupported.
            InvalidArgument: an argument is out of range.
        """
        facts = ModelFacts.from_config(config) if isinstance(config, Mapping) else ModelFacts.from_file(Path(config))
        return cls.of_model(facts, block_tokens=block_tokens, dtype=dtype, scheme=scheme)

    @classmethod
    def of_model(
        cls, facts: ModelFacts, *, block_tokens: int = DEFAULT_BLOCK_TOKENS, dtype: str = "", scheme: CacheScheme = NONE
    ) -> "CacheSpec":
        """Return the cache of a model. Raises InvalidArgument: an argument is out of range."""
        latent, window = facts.latent, facts.window
        return cls(
            layers=facts.layers,
            heads=facts.heads,
            kv_heads=1 if latent else facts.kv_heads,
            head_dim=latent.cached_dim if latent else facts.head_dim,
            attention=Attention.MLA if latent else None,
            dtype=dtype or facts.dtype,
            block_tokens=block_tokens,
            scheme=scheme,
            window_tokens=window.tokens if window else 0,
            windowed_layers=window.layers if window else 0,
            model=facts.name,
        )

    @property
    def kv_factor(self) -> int:
        """Tensors per layer: 2, keys and values; 1 with MLA."""
        return 1 if self.attention is Attention.MLA else 2

    @property
    def kinds(self) -> tuple[bool, ...]:
        """`is_key` of each tensor, keys first. MLA's latent counts as a key."""
        return (True, False)[: self.kv_factor]

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element before quantisation."""
        return dtype_bytes(self.dtype)

    def record_bytes(self, is_key: bool) -> int:
        """Return the bytes of one block of one head of one layer: K or V, payload and metadata."""
        return self.scheme.of(is_key).record_bytes(is_key, tokens=self.block_tokens, head_dim=self.head_dim, dtype_bytes=self.dtype_bytes)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block's elements, in all layers."""
        return self._all_records(sum(self._payload_bytes(is_key) for is_key in self.kinds))

    @property
    def metadata_bytes(self) -> int:
        """Bytes of one block's scales, minimums and zero points, in all layers."""
        return self.block_bytes - self.payload_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, payload and metadata."""
        return self._all_records(sum(map(self.record_bytes, self.kinds)))

    @property
    def effective_bits(self) -> float:
        """Bits per element, including metadata."""
        return 8 * self.block_bytes / self._all_records(self.kv_factor * self.block_tokens * self.head_dim)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in all layers, with its possibly fractional share of metadata, regardless of windows."""
        return self.block_bytes / self.block_tokens

    def sequence_bytes(self, tokens: int) -> float:
        """Return the bytes that a sequence of `tokens` tokens must keep: for windowed layers only the last
        window_tokens.

        A partial last block counts proportionally. Raises InvalidArgument: a negative number.
        """
        if tokens < 0:
            raise InvalidArgument(f"tokens is {tokens}: a sequence has 0 or more")
        full_layers = self.layers - self.windowed_layers
        kept = full_layers * tokens + self.windowed_layers * min(tokens, self.window_tokens)
        return self.block_bytes * kept / (self.layers * self.block_tokens)

    def batch_bytes(self, lengths: Iterable[int]) -> float:
        """Return the bytes that sequences of these lengths must keep together, without sharing."""
        return sum(map(self.sequence_bytes, lengths))

    def shard(self, tp: int) -> "CacheSpec":
        """Return the part of the cache on one of `tp` tensor-parallel ranks. With more ranks than KV heads each rank
        has a copy of one.

        Raises:
            InvalidArgument: `tp` does not divide the heads.
        """
        if tp < 1 or self.heads % tp or (self.kv_heads % tp and tp % self.kv_heads):
            raise InvalidArgument(f"tp is {tp}: {self.heads} heads and {self.kv_heads} KV heads cannot be divided among that many ranks")
        attention = self.attention if self.attention is Attention.MLA else None
        return replace(self, heads=self.heads // tp, kv_heads=max(1, self.kv_heads // tp), attention=attention)

    def _payload_bytes(self, is_key: bool) -> int:
        return self.scheme.of(is_key).payload_bytes(is_key, tokens=self.block_tokens, head_dim=self.head_dim, dtype_bytes=self.dtype_bytes)

    def _all_records(self, of_one_head: int) -> int:
        return self.layers * self.kv_heads * of_one_head
