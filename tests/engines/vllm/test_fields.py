"""Texts of settings: equal for equal values in every process, other ones for others."""

import dataclasses
import enum
from pathlib import Path
from typing import Any

import pytest

from kvstore.engines.vllm import fields


class Kind(enum.Enum):
    ONE = "1"


@dataclasses.dataclass
class CacheConfig:
    """As vLLM's, with a field that no table has."""

    mamba_cache_dtype: object = "auto"
    gpu_memory_utilization: float = 0.9
    newer: object = None
    newer_list: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class MultiModalConfig:
    mm_encoder_fp8_scale_path: str | None = None


@dataclasses.dataclass
class FullAttentionSpec:
    block_size: int = 16
    dtype: str = "uint8"


def test_values_have_known_fields_and_set_newer_ones() -> None:
    assert fields.values(CacheConfig()) == {"CacheConfig.mamba_cache_dtype": '"auto"'}
    assert fields.values(CacheConfig(newer=3, newer_list=["a"])) == {
        "CacheConfig.mamba_cache_dtype": '"auto"',
        "CacheConfig.newer": "3",
        "CacheConfig.newer_list": '["a"]',
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Kind.ONE, '"ONE"'),
        ({"b", "a"}, '["a", "b"]'),
        (FullAttentionSpec(), '{"block_size": 16, "dtype": "uint8"}'),
        (Path, '"Path"'),
        (Path("x"), '"x"'),
    ],
)
def test_values_of_any_kind_have_a_text(value: Any, text: str) -> None:
    assert fields.values(CacheConfig(value)) == {"CacheConfig.mamba_cache_dtype": text}


def test_values_that_name_a_file_are_its_contents(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    other.write_text("1")
    assert fields.values(MultiModalConfig(str(one))) == fields.values(MultiModalConfig(str(other))) != fields.values(MultiModalConfig())
    other.write_text("2")
    assert fields.values(MultiModalConfig(str(one))) != fields.values(MultiModalConfig(str(other)))


def test_spec_text_has_the_kind_and_the_element_type() -> None:
    assert fields.spec_text(FullAttentionSpec()) == 'FullAttentionSpec dtype="uint8"'


def test_summary_shows_what_is_set_and_differs_by_all() -> None:
    empty, chosen = {"a": "null", "b": '"auto"'}, {"a": "null", "b": '"float16"'}
    assert fields.summary(empty) == fields.digest(empty)
    assert fields.summary(chosen) == f'{fields.digest(chosen)} b="float16"'
    long = {"a": '"x"' * 1000}
    assert len(fields.summary(long)) == fields.MAX_TEXT
    assert fields.summary(long) != fields.summary({"a": '"x"' * 1001})
