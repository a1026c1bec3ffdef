"""Reads a Hugging Face config.json into the fields of facts.ModelFacts: field names, defaults and exceptions of model
families.

Families use different names for the same thing and omit what their code implies. An unknown family works if it uses one
of the names below. Caches of another kind (recurrent layers, an encoder) are rejected.

Source: the configuration classes of transformers (src/transformers/models/*/configuration_*.py), and its models for
what those leave open.
"""

from collections.abc import Mapping
from typing import Any, Final

from kvstore.kvcache.models.table import DTYPE_BYTES
from kvstore.protocol.errors import ConfigError

Config = Mapping[str, Any]

NAMES: Final[dict[str, tuple[str, ...]]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "active_experts": ("num_experts_per_tok", "experts_per_token", "moe_top_k"),
    "expert_ffn": ("moe_intermediate_size", "intermediate_size", "ffn_hidden_size"),
}
"""Our fields, and the configuration fields that may hold them; the first one that is not null counts."""

NESTED: Final = ("text_config", "llm_config", "language_config", "attn_config", "ffn_config")
"""Objects whose fields count as the configuration's own: the language model of a multimodal one; MPT's and DBRX's
parts."""

FAMILIES: Final[dict[str, Config]] = {
    "bloom": {"tie_word_embeddings": True},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon": {"tie_word_embeddings": True, "multi_query": True},
    "gemma": {"tie_word_embeddings": True, "head_dim": 256},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gpt2": {"tie_word_embeddings": True},
    "gpt_bigcode": {"tie_word_embeddings": True, "multi_query": True},
    "gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 4096},
    "mpt": {"tie_word_embeddings": True},
    "opt": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen2_moe": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "max_window_layers": 28, "head_dim": 128},
    "qwen3_moe": {"use_sliding_window": False},
}
"""Defaults of a family's configuration class, for fields that the file lacks (null counts as present)."""

_QUADRUPLE_FFN: Final = frozenset(("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gptj", "mpt"))
"""Families whose feed-forward width defaults to 4 times `hidden`."""
_PLAIN_FFN: Final = _QUADRUPLE_FFN | {"apertus", "arcee", "gpt_neox", "nemotron", "opt", "phi", "starcoder2"}
"""Families whose feed-forward network has two matrices instead of three."""

MAX_COUNT: Final = 1 << 20
"""Limit of every count: a larger one is a mistake, and would be a very long loop over layers."""

OTHER_CACHES: Final = {
    "is_encoder_decoder": "an encoder's keys and values are cached too",
    "attention_chunk_size": "layers attend within chunks",
    "layers_block_type": "not all layers have attention",
    "block_types": "not all layers have attention",
    "attn_layer_period": "not all layers have attention",
    "attn_layer_indices": "not all layers have attention",
    "hybrid_override_pattern": "not all layers have attention",
    "full_attention_interval": "not all layers keep keys and values",
    "attn_type_list": "not all layers keep keys and values",
    "linear_attn_config": "not all layers keep keys and values",
    "linear_num_heads": "not all layers keep keys and values",
    "conv_L_cache": "not all layers keep keys and values",
    "zero_expert_num": "a layer has two attentions",
    "num_kv_shared_layers": "layers use the keys and values of others",
    "cross_attention_layers": "layers attend to images",
    "index_head_dim": "an indexer keeps a cache of its own",
    "global_head_dim": "layers differ in the size of a head",
    "per_layer_config": "layers differ in their shapes",
    "swa_num_key_value_heads": "layers differ in their KV heads",
    "attention_types": "layers are windowed by a list of their own kind",
}
"""Fields that, if set, mean a cache of an unsupported kind, with the reason."""


def is_config(found: Config) -> bool:
    """Return whether a JSON object is a Hugging Face configuration, by fields that every one has."""
    return any(name in found for name in ("model_type", "architectures", *NAMES["layers"], *NESTED))


def model_fields(config: Config, *, name: str = "") -> dict[str, Any]:
    """Return the fields of ModelFacts (parts as nested objects) in `config`.

    `name`: the model's name; "": that of the configuration, else its family.

    Raises:
        ConfigError: required fields are missing (the text lists them) or not numbers, or the cache is of another kind.
    """
    return _ConfigReader(config, name).fields()


class _ConfigReader:
    """One configuration, flattened and with its family's defaults."""

    def __init__(self, config: Config, name: str) -> None:
        flat = dict(config)
        for nested in NESTED:
            inner = config.get(nested)
            if isinstance(inner, Mapping):
                # Nested parts may repeat outer fields with empty values.
                flat |= {field: value for field, value in inner.items() if value not in (None, "") or field not in flat}
        self._family = str(flat.get("model_type", ""))
        self._config = {**FAMILIES.get(self._family, {}), **flat}
        self.name = name or str(config.get("_name_or_path") or self._family or "unnamed")

    def fields(self) -> dict[str, Any]:
        self._refuse_other_caches()
        self._check_all_there()
        self._layers, self._hidden, self._heads = self._needed("layers"), self._needed("hidden"), self._needed("heads")
        latent = self._latent()
        return {
            "name": self.name,
            "layers": self._layers,
            "hidden": self._hidden,
            "heads": self._heads,
            "kv_heads": self._heads if latent else self._kv_heads(),
            "head_dim": self._head_dim(has_latent=latent is not None),
            "ffn": self._number("ffn") or 4 * self._hidden,
            "vocab": self._needed("vocab"),
            "is_gated": self._family not in _PLAIN_FFN,
            "is_tied": bool(self._config.get("tie_word_embeddings", False)),
            "dtype": self._dtype(),
            "weight_bits": self._weight_bits(),
            "latent": latent,
            "window": self._window(),
            "experts": self._experts(),
        }

    def _refuse_other_caches(self) -> None:
        for field, why in OTHER_CACHES.items():
            if self._config.get(field):
                raise self._error(f"{field} is {self._config[field]!r}, so {why}: a cache of this kind is not supported")
        if any(field.startswith("mamba_") for field in self._config):
            raise self._error("it has mamba_ fields, so layers keep a state instead of tokens: this is not supported")

    def _check_all_there(self) -> None:
        needed = ["layers", "hidden", "heads", "vocab"]
        if self._family not in _QUADRUPLE_FFN:
            needed.append("ffn")
        if self._has_experts():
            needed += ["active_experts", "expert_ffn"]
        missing = [" or ".join(NAMES[ours]) for ours in needed if self._find(ours)[1] is None]
        if self._config.get("kv_lora_rank") is not None:
            fields = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
            missing += [field for field in fields if self._config.get(field) is None]
        if missing:
            raise self._error(f"it lacks {'; '.join(missing)}")

    def _kv_heads(self) -> int:
        # Falcon's first architecture ignores num_kv_heads; ChatGLM gives the number of groups.
        is_multi_query = self._config.get("multi_query", False) and not self._config.get("new_decoder_architecture", False)
        return 1 if is_multi_query else self._number("kv_heads") or self._heads

    def _head_dim(self, *, has_latent: bool) -> int:
        if has_latent:
            # With MLA `head_dim` is only the rotary part.
            return self._count("qk_nope_head_dim") + self._count("qk_rope_head_dim")
        head_dim = self._number("head_dim")
        if not head_dim:
            head_dim, rest = divmod(self._hidden, self._heads)
            if rest:
                raise self._error(f"it has no head_dim, and its hidden size {self._hidden} is no multiple of its {self._heads} heads")
        value_dim = self._config.get("v_head_dim") or head_dim
        if value_dim != head_dim:
            raise self._error(f"v_head_dim is {value_dim} and head_dim {head_dim}: keys and values of different sizes are not supported")
        return head_dim

    def _latent(self) -> dict[str, int] | None:
        if self._config.get("kv_lora_rank") is None:
            return None
        return {
            "kv_rank": self._count("kv_lora_rank"),
            "rope_dim": self._count("qk_rope_head_dim"),
            "value_dim": self._count("v_head_dim"),
            "query_rank": 0 if self._config.get("q_lora_rank") is None else self._count("q_lora_rank"),
        }

    def _window(self) -> dict[str, int] | None:
        types = self._config.get("layer_types")
        if types is not None:
            self._check_layers("layer_types", types, ("full_attention", "sliding_attention"))
        if not self._config.get("sliding_window") or not self._config.get("use_sliding_window", True):
            return None
        windowed = self._windowed_layers(types)
        return {"tokens": self._count("sliding_window"), "layers": windowed} if windowed else None

    def _check_layers(self, field: str, kinds: Any, known: tuple[str, str]) -> None:
        if not isinstance(kinds, (list, tuple)) or len(kinds) != self._layers:
            raise self._error(f"{field} must be a list with an entry for each of the {self._layers} layers")
        for layer, kind in enumerate(kinds):
            if kind not in known:
                raise self._error(f"{field} has {kind!r} for layer {layer}: only {' and '.join(known)} are supported")

    def _windowed_layers(self, types: Any) -> int:
        if types is not None:
            return sum(kind == "sliding_attention" for kind in types)
        if self._config.get("sliding_window_pattern") is not None:
            return self._layers - self._layers // self._count("sliding_window_pattern")
        if self._config.get("max_window_layers") is not None:
            return max(0, self._layers - self._count("max_window_layers", lowest=0))
        return self._layers

    def _has_experts(self) -> bool:
        return (self._number("experts") or 0) > 1

    def _experts(self) -> dict[str, int] | None:
        if not self._has_experts():
            return None
        width = self._needed("expert_ffn")
        return {
            "count": self._needed("experts"),
            "active": self._needed("active_experts"),
            "ffn": width,
            "shared_ffn": self._optional("shared_expert_intermediate_size") or width * self._optional("n_shared_experts"),
            "dense_layers": self._layers - self._sparse_layers(),
        }

    def _sparse_layers(self) -> int:
        """Return the number of layers with experts: listed, or by DeepSeek's and Qwen's rules."""
        kinds = self._config.get("mlp_layer_types")
        if kinds is not None:
            self._check_layers("mlp_layer_types", kinds, ("dense", "sparse"))
            return sum(kind == "sparse" for kind in kinds)
        first, frequency, step = (self._optional(field) for field in ("first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step"))
        dense = self._config.get("mlp_only_layers") or ()
        if not isinstance(dense, (list, tuple)):
            raise self._error(f"mlp_only_layers is {dense!r}: it must be a list of layers")
        return sum(
            layer not in dense and layer % (frequency or 1) == 0 and (layer + 1) % (step or 1) == 0 for layer in range(first, self._layers)
        )

    def _dtype(self) -> str:
        said = self._config.get("dtype") or self._config.get("torch_dtype") or "auto"
        dtype = str(said).removeprefix("torch.")
        if dtype == "auto":
            return "bfloat16"
        if dtype not in DTYPE_BYTES:
            raise self._error(f"dtype is {dtype!r}: known are {', '.join(DTYPE_BYTES)}")
        return dtype

    def _weight_bits(self) -> int:
        """Return the bits of a weight; 0: those of dtype, also for unknown methods."""
        quantised = self._config.get("quantization_config")
        if not isinstance(quantised, Mapping):
            return 0
        if quantised.get("quant_method") == "fp8" or quantised.get("load_in_8bit"):
            return 8
        if quantised.get("load_in_4bit"):
            return 4
        bits = quantised.get("bits")
        return bits if type(bits) is int else 0

    def _needed(self, ours: str) -> int:
        """Return a number whose presence `_check_all_there` has checked."""
        number = self._number(ours)
        assert number is not None, ours
        return number

    def _number(self, ours: str) -> int | None:
        """Return the number in one of NAMES[`ours`]; None: absent."""
        field, value = self._find(ours)
        return None if value is None else self._count(field)

    def _find(self, ours: str) -> tuple[str, Any]:
        return next(((field, self._config[field]) for field in NAMES[ours] if self._config.get(field) is not None), ("", None))

    def _optional(self, field: str) -> int:
        """Return the number in a field; 0: absent."""
        return 0 if self._config.get(field) is None else self._count(field, lowest=0)

    def _count(self, field: str, *, lowest: int = 1) -> int:
        value = self._config[field]
        if type(value) is not int or not lowest <= value <= MAX_COUNT:
            raise self._error(f"{field} is {value!r}: it must be a whole number from {lowest} to {MAX_COUNT}")
        return value

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"the configuration of {self.name}: {what}")
