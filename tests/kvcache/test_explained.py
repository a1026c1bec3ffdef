"""Promises of explained.py: all fields of a namespace are said, each difference has a sentence, and a salt is never shown."""

from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

import pytest

from kvstore.kvcache.explained import differences, fields, layout
from kvstore.kvcache.namespace import Namespace

ONE = Namespace(model="llama", revision="base@v1", dtype="bf16", block_tokens=16)
NAMES = ("aaaa", "bbbb")


def test_every_field_is_said() -> None:
    found = dict(fields(ONE))
    assert found == {
        "model": "llama",
        "weights": "base",
        "version": "v1",
        "adapter": "none",
        "dtype": "bf16",
        "block_tokens": "16",
        "layers": "all",
        "heads": "all",
        "position": "none",
        "tenant": "none",
        "salt": "none",
        "hash": "xxh3",
    }
    full = replace(ONE, revision="", layers=(0, 4), heads=(1, 2), salt="pepper", extra={"kv": "fp8", "empty": ""}, adapter="lora")
    told = dict(fields(full))
    assert (told["weights"], told["version"], told["layers"], told["heads"]) == ("none", "that of the files", "0 to 3", "rank 1 of 2")
    assert (told["extra.kv"], told["extra.empty"], told["salt"], told["adapter"]) == ("fp8", '""', "set", "lora")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "qwen"}, "model is llama in aaaa and qwen in bbbb. Engines of different models"),
        ({"revision": "other@v1"}, "weights is base in aaaa and other in bbbb. Start both from equal files"),
        ({"revision": "base"}, "version is v1 in aaaa and that of the files in bbbb. Bring both"),
        ({"adapter": "lora"}, "adapter is none in aaaa and lora in bbbb"),
        ({"dtype": "fp8_e4m3"}, "dtype is bf16 in aaaa and fp8_e4m3 in bbbb"),
        ({"block_tokens": 32}, "block_tokens is 16 in aaaa and 32 in bbbb. Set the same block size"),
        ({"layers": (0, 4)}, "layers is all in aaaa and 0 to 3 in bbbb"),
        ({"heads": (0, 2)}, "heads is all in aaaa and rank 0 of 2 in bbbb"),
        ({"position": "yarn"}, "position is none in aaaa and yarn in bbbb"),
        ({"extra": {"images": "on"}}, "extra.images is not set in aaaa and on in bbbb. Set it alike"),
        ({"tenant": "red"}, "tenant is none in aaaa and red in bbbb"),
        ({"salt": "pepper"}, "salt is none in aaaa and set in bbbb"),
        ({"hash": "sha256"}, "hash is xxh3 in aaaa and sha256 in bbbb"),
    ],
)
def test_each_difference_has_a_sentence(change: dict[str, Any], told: str) -> None:
    [line] = differences(ONE, replace(ONE, **change), NAMES)
    assert line.startswith(told)


def test_every_field_of_a_namespace_has_a_difference() -> None:
    """A field that is added to Namespace is said here, too."""
    assert {field.name for field in fields_of(Namespace)} == {
        *("model", "revision", "adapter", "dtype", "block_tokens", "layers", "heads", "position", "extra", "tenant", "salt", "hash", "id")
    }


def test_two_salts_differ_and_neither_is_shown() -> None:
    [line] = differences(replace(ONE, salt="pepper"), replace(ONE, salt="garlic"), NAMES)
    assert line == "salt differs. Set the same salt on both, or none."


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "bf16, 16 tokens a block"),
        ({"block_tokens": 1, "adapter": "poet"}, "bf16, 1 token a block, adapter poet"),
        ({"layers": (0, 16), "heads": (1, 2)}, "bf16, 16 tokens a block, layers 0 to 15, rank 1 of 2"),
    ],
)
def test_the_layout_of_blocks_is_a_line(change: dict[str, Any], text: str) -> None:
    assert layout(replace(ONE, **change)) == text
