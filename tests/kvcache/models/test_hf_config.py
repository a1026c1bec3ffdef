"""Configurations as published (the fields that matter) give the shapes that are known of their models."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kvcache.models.facts import ModelFacts
from kvstore.kvcache.models.hf_config import NESTED, OTHER_CACHES, model_fields
from kvstore.kvcache.models.named import find_model
from kvstore.protocol.errors import ConfigError

Config = dict[str, Any]

PUBLISHED: dict[str, Config] = json.loads(Path(__file__).with_name("published.json").read_text())
"""Of config.json on huggingface.co the fields that matter, by our names of the models."""
LLAMA3_8B = PUBLISHED["llama3-8b"]


@pytest.mark.parametrize(("name", "config"), PUBLISHED.items())
def test_a_published_configuration_gives_the_facts_of_the_list(name: str, config: Config) -> None:
    assert ModelFacts.from_config(config, name=name) == find_model(name)


def fields(**changes: Any) -> Config:
    """Of Llama 3 8B with some fields of its configuration changed; None takes one away."""
    return model_fields({name: value for name, value in (LLAMA3_8B | changes).items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({"num_key_value_heads": None}, 32),
        ({"num_key_value_heads": None, "multi_query": True}, 1),
        ({"num_key_value_heads": None, "num_kv_heads": 4, "multi_query": True, "new_decoder_architecture": True}, 4),
        ({"num_key_value_heads": None, "multi_query": False, "n_head_kv": 16}, 16),
        ({"num_key_value_heads": None, "multi_query_attention": True, "multi_query_group_num": 2}, 2),
        ({"num_key_value_heads": None, "attn_config": {"kv_n_heads": 8, "model_type": ""}}, 8),
    ],
)
def test_kv_heads_go_by_many_names(changes: Config, kv_heads: int) -> None:
    assert fields(**changes)["kv_heads"] == kv_heads


def test_a_familys_own_defaults_hold_where_the_file_says_nothing() -> None:
    """The 4B of Gemma 3 leaves out its heads; StarCoder is multi-query unless told otherwise; Mistral's class has v0.1's window."""
    gemma = model_fields(
        {
            "model_type": "gemma3",
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
        }
    )
    assert (gemma["heads"], gemma["kv_heads"], gemma["head_dim"], gemma["vocab"], gemma["is_tied"]) == (8, 4, 256, 262_208, True)
    assert gemma["window"] == {"tokens": 4096, "layers": 29}
    assert fields(model_type="gpt_bigcode", num_key_value_heads=None)["kv_heads"] == 1
    assert fields(model_type="mistral")["window"] == {"tokens": 4096, "layers": 32}
    assert fields(model_type="bloom", intermediate_size=None)["ffn"] == 4 * 4096


def test_unknown_family_is_read_by_its_fields() -> None:
    assert fields(model_type="brand_new") == fields() | {"name": "brand_new"}
    assert not fields(model_type="gpt_neox")["is_gated"]


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({}, 0),
        ({"sliding_window": 128}, 32),
        ({"sliding_window": 0}, 0),
        ({"sliding_window": 128, "use_sliding_window": False}, 0),
        ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 28}, 4),
        ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 40}, 0),
        ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}, 32),
        ({"sliding_window": 128, "sliding_window_pattern": 6}, 27),
        ({"sliding_window": 128, "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 29}, 3),
        ({"layer_types": ["full_attention"] * 32}, 0),
        ({"model_type": "qwen2", "sliding_window": 128}, 0),
        ({"model_type": "gpt_oss"}, 16),
    ],
)
def test_which_layers_are_windowed_is_said_in_several_ways(changes: Config, windowed: int) -> None:
    assert fields(**changes)["window"] == ({"tokens": 128, "layers": windowed} if windowed else None)


@pytest.mark.parametrize(
    ("changes", "experts"),
    [
        ({"num_experts": 1}, None),
        (
            {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
            {"count": 60, "active": 4, "ffn": 1408, "shared_ffn": 5632, "dense_layers": 0},
        ),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2, "mlp_only_layers": [1, 2]},
            {"count": 8, "active": 2, "ffn": 14336, "shared_ffn": 0, "dense_layers": 17},
        ),
        (
            {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 3, "moe_layer_freq": 2},
            {"count": 8, "active": 2, "ffn": 14336, "shared_ffn": 0, "dense_layers": 18},
        ),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "mlp_layer_types": ["dense"] * 4 + ["sparse"] * 28},
            {"count": 8, "active": 2, "ffn": 14336, "shared_ffn": 0, "dense_layers": 4},
        ),
        (
            {"ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}, "intermediate_size": None},
            {"count": 16, "active": 4, "ffn": 10752, "shared_ffn": 0, "dense_layers": 0},
        ),
    ],
)
def test_experts_are_counted_layer_by_layer(changes: Config, experts: Config | None) -> None:
    assert fields(**changes)["experts"] == experts


@pytest.mark.parametrize(
    ("quantisation", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "gptq", "bits": 3}, 3),
        ({"quant_method": "something"}, 0),
        ("something", 0),
    ],
)
def test_quantised_weights_are_known_by_their_bits(quantisation: Any, bits: int) -> None:
    assert fields(quantization_config=quantisation)["weight_bits"] == bits


def test_name_is_the_given_one_or_the_configuration_s() -> None:
    assert model_fields(LLAMA3_8B, name="mine")["name"] == "mine"
    assert fields(_name_or_path="meta-llama/Meta-Llama-3-8B")["name"] == "meta-llama/Meta-Llama-3-8B"
    assert fields(_name_or_path="")["name"] == "llama"
    assert fields(model_type=None)["name"] == "unnamed"


@pytest.mark.parametrize("field", OTHER_CACHES)
def test_unsupported_cache_is_rejected_with_its_field(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"the configuration of llama: {field} is 2, so .*: a cache of this kind is not supported"):
        fields(**{field: 2})
    assert fields(**{field: False}) == fields()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None, "vocab_size": None}, "it lacks hidden_size or n_embd or d_model; vocab_size or padded_vocab_size$"),
        ({"intermediate_size": None}, "it lacks intermediate_size or ffn_dim or n_inner or ffn_hidden_size$"),
        ({"num_local_experts": 8}, "it lacks num_experts_per_tok or experts_per_token or moe_top_k$"),
        ({"kv_lora_rank": 512, "v_head_dim": 128}, "it lacks qk_rope_head_dim; qk_nope_head_dim$"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32': it must be a whole number from 1 to 1048576"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0: it must be a whole number from 1 to 1048576"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"vocab_size": 1.5}, "vocab_size is 1.5"),
        ({"hidden_size": 4095}, "it has no head_dim, and its hidden size 4095 is no multiple of its 32 heads"),
        ({"v_head_dim": 64}, "v_head_dim is 64 and head_dim 128: keys and values of different sizes"),
        ({"torch_dtype": "int4"}, "dtype is 'int4': known are float64"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list with an entry for each of the 32 layers"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
        ({"layer_types": ["mamba"] * 32}, "layer_types has 'mamba' for layer 0: only full_attention and sliding_attention are supported"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 1000"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": 3}, "mlp_only_layers is 3: it must be a list of layers"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": [1]}, r"moe_layer_freq is \[1\]: it must be a whole number from 0"),
        ({"mamba_d_ssm": 4}, "it has mamba_ fields, so layers keep a state"),
    ],
)
def test_what_is_missing_or_wrong_is_said_once_and_by_name(changes: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^the configuration of llama: {message}"):
        fields(**changes)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
JSON = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)
FIELDS = sorted(
    {*(name for config in PUBLISHED.values() for name in config), *OTHER_CACHES, *NESTED, "layer_types", "sliding_window_pattern"}
)


@given(
    config=st.sampled_from(list(PUBLISHED.values())),
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
)
def test_whatever_a_file_says_it_is_a_model_or_one_kind_of_error(config: Config, changes: Config) -> None:
    try:
        facts = ModelFacts.from_config(config | changes)
    except ConfigError:
        return
    assert facts.weight_bytes > 0
