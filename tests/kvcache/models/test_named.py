"""The models' shapes give the cache and the weights that are published of them."""

import pytest

from kvstore.kvcache.models.named import MODELS, SAME_SHAPE, find_model
from kvstore.protocol.errors import ConfigError

PUBLISHED_BILLIONS = {
    "llama2-7b": 6.74,
    "llama2-13b": 13.02,
    "llama2-70b": 68.98,
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "llama3-405b": 405.85,
    "llama3.2-1b": 1.24,
    "llama3.2-3b": 3.21,
    "mistral-7b-v0.1": 7.24,
    "mistral-7b": 7.25,
    "mistral-nemo-12b": 12.25,
    "mixtral-8x7b": 46.70,
    "mixtral-8x22b": 140.63,
    "qwen2.5-7b": 7.62,
    "qwen2.5-32b": 32.76,
    "qwen2.5-72b": 72.71,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09,
    "gemma-2-9b": 9.24,
    "gemma-3-12b": 12.19 - 0.42,  # less what sees
    "gemma-3-27b": 27.43 - 0.42,
    "deepseek-v2-lite": 15.71,
    "deepseek-v2": 235.74,
    "deepseek-v3": 671.03,
    "falcon-7b": 6.92,
    "opt-6.7b": 6.66,
    "gpt-2": 0.1244,
    "gpt-3": 174.6,
}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_BILLIONS.items())
def test_parameters_are_those_published_within_a_percent(name: str, billions: float) -> None:
    assert find_model(name).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_every_model_is_tested_above_and_named_as_its_key() -> None:
    assert list(MODELS) == list(PUBLISHED_BILLIONS)
    assert all(facts.name == name for name, facts in MODELS.items())


def test_an_unknown_model_is_answered_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"no model is named 'llama9': take one of llama2-7b, .*, or a Hugging Face config\.json or a \.json file"
    ):
        find_model("llama9")


def test_a_model_is_found_whatever_the_case_of_its_name() -> None:
    assert find_model("DeepSeek-V3") is MODELS["deepseek-v3"]


def test_a_model_of_the_same_shape_is_found_by_its_own_name_too() -> None:
    assert find_model("Llama3.1-8B") is MODELS["llama3-8b"]
    assert not set(SAME_SHAPE) & set(MODELS)
    assert set(SAME_SHAPE.values()) <= set(MODELS)
