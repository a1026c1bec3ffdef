"""A model's figures follow from its shape, wherever the shape comes from; a shape that cannot be is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.kvcache.models.facts import Experts, LatentAttention, ModelFacts, SlidingWindow
from kvstore.protocol.errors import ConfigError

DENSE = ModelFacts("dense", layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=100, vocab=1000)
MLA = LatentAttention(kv_rank=32, rope_dim=4, value_dim=8, query_rank=20)
EXPERTS = Experts(8, 2, ffn=30, shared_ffn=50, dense_layers=1)


def test_dense_model_has_four_projections_and_a_ffn() -> None:
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    assert DENSE.attention_parameters == attention
    assert DENSE.layer_parameters == 3 * (attention + 3 * 64 * 100)
    assert DENSE.parameters == DENSE.layer_parameters + 2 * 1000 * 64
    assert DENSE.weight_bytes == 2 * DENSE.parameters
    assert DENSE.specials == ()


def test_a_plain_feed_forward_network_has_two_matrices() -> None:
    assert (replace(DENSE, is_gated=False).ffn_matrices, DENSE.ffn_matrices) == (2, 3)


def test_a_tied_embedding_is_counted_once() -> None:
    tied = replace(DENSE, is_tied=True)
    assert tied.parameters == DENSE.parameters - 1000 * 64


def test_quantised_weights_are_those_of_the_layers() -> None:
    assert replace(DENSE, weight_bits=4).weight_bytes == DENSE.layer_parameters // 2 + 2 * DENSE.embedding_parameters


def test_experts_and_what_they_share_are_counted() -> None:
    facts = replace(DENSE, experts=EXPERTS)
    common = 3 * DENSE.attention_parameters + 3 * 64 * 100 + 2 * (64 * 8 + 3 * 64 * 50)
    assert facts.layer_parameters == common + 2 * 8 * (3 * 64 * 30)
    assert facts.specials == ("a mixture of experts",)


@pytest.mark.parametrize("query_rank", [20, 0])
def test_latent_attention_projects_down_and_up_again(query_rank: int) -> None:
    """Queries (compressed or not) of 4 heads of 16, the latent of 32 and a rotary part of 4; keys of 12 and values of 8 from the latent."""
    facts = replace(DENSE, latent=replace(MLA, query_rank=query_rank))
    queries = 64 * 20 + 20 * 4 * 16 if query_rank else 64 * 4 * 16
    assert facts.attention_parameters == queries + 64 * (32 + 4) + 32 * 4 * (12 + 8) + 4 * 8 * 64
    assert facts.kv_bytes_per_token == 3 * 36 * 2
    assert facts.specials == ("latent attention",)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "layers is 0: it must be above 0"),
        ({"weight_bits": -1}, "weight_bits is -1"),
        ({"kv_heads": 3}, "heads is 4: it must be a multiple of kv_heads, 3"),
        ({"dtype": "int3"}, "dtype is 'int3': take one of float64, float32"),
        ({"window": SlidingWindow(8, layers=4)}, "window.layers is 4: there are only 3 layers"),
        ({"experts": replace(EXPERTS, dense_layers=4)}, "dense_layers is 4: there are only 3 layers"),
        ({"latent": replace(MLA, rope_dim=16)}, "rope_dim is 16: it is a part of head_dim, 16"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(DENSE, **wrong)  # type: ignore[arg-type]


def test_a_part_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_rank is 0"):
        replace(MLA, kv_rank=0)
    with pytest.raises(ConfigError, match="tokens is 0"):
        SlidingWindow(0, layers=1)
    with pytest.raises(ConfigError, match="active is 9: there are only 8 experts"):
        replace(EXPERTS, active=9)


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "vocab_size": 1000,
}


def test_from_file_reads_both_forms_and_names_config_json(tmp_path: Path) -> None:
    directory = tmp_path / "dense"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    assert ModelFacts.from_file(directory / "config.json") == DENSE
    (tmp_path / "other.json").write_text(json.dumps(CONFIG))
    assert ModelFacts.from_file(tmp_path / "other.json") == replace(DENSE, name="other")
    own = {"name": "mine", "layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 100, "vocab": 1000}
    (tmp_path / "own.json").write_text(json.dumps(own | {"experts": {"count": 8, "active": 2, "ffn": 30}}))
    assert ModelFacts.from_file(tmp_path / "own.json") == replace(DENSE, name="mine", experts=Experts(8, 2, ffn=30))


def test_what_a_file_lacks_is_told_in_the_words_of_its_kind(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text('{"name": "mine", "layers": 3}')
    with pytest.raises(ConfigError, match=r"the model in .*own\.json: missing fields \['hidden', 'heads', 'kv_heads'"):
        ModelFacts.from_file(tmp_path / "own.json")
    (tmp_path / "hf.json").write_text('{"model_type": "llama", "num_hidden_layers": 3}')
    with pytest.raises(ConfigError, match=r"the configuration of hf: it lacks hidden_size or n_embd or d_model; num_attention_heads"):
        ModelFacts.from_file(tmp_path / "hf.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelFacts.from_file(tmp_path)
