"""The models' shapes give the cache and the weights that are published of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.kvcache.models import MODELS, find_model
from kvstore.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "kib"), [("llama3-8b", 128), ("llama3-70b", 320), ("llama3-405b", 504), ("llama2-7b", 512), ("gpt-3", 4608)]
)
def test_kv_bytes_of_a_token(name: str, kib: int) -> None:
    assert find_model(name).kv_bytes_per_token == kib * 1024


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2-7b", 6.74),
        ("llama2-13b", 13.02),
        ("llama2-70b", 68.98),
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.85),
        ("mistral-7b", 7.25),
        ("qwen2.5-7b", 7.62),
        ("qwen2.5-72b", 72.71),
        ("opt-6.7b", 6.86),  # 6.66 published: it ties embedding and logits
        ("gpt-3", 175.2),  # 174.6 published: as OPT
    ],
)
def test_weights_are_those_published_within_a_percent(name: str, billions: float) -> None:
    assert find_model(name).weight_bytes / 2e9 == pytest.approx(billions, rel=0.01)


def test_every_model_is_tested_above_and_named_as_its_key() -> None:
    assert len(MODELS) == 11
    assert all(facts.name == name for name, facts in MODELS.items())


def test_a_plain_feed_forward_network_has_two_matrices() -> None:
    assert (find_model("gpt-3").ffn_matrices, find_model("llama2-7b").ffn_matrices) == (2, 3)


def test_an_unknown_model_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no model is named 'llama9': take one of llama2-7b, llama2-13b"):
        find_model("llama9")


def test_a_model_of_ones_own_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text('{"name":"tiny","layers":2,"hidden":64,"heads":4,"kv_heads":2,"head_dim":16,"ffn":256,"vocab":100,"dtype_bytes":1}')
    assert find_model(str(path)).kv_bytes_per_token == 2 * 2 * 2 * 16


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers is 0"):
        replace(find_model("llama2-7b"), layers=0)
    with pytest.raises(ConfigError, match="a multiple of kv_heads, 5"):
        replace(find_model("llama2-7b"), kv_heads=5)
