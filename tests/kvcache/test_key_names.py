"""Promises of key_names.py: keys are those of the engines, however they are come by."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kvcache.key_names import NAMINGS, Naming, VllmNaming, make_naming
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ConfigError, InvalidArgument

ID = "000102030405060708090a0b0c0d0e0f"


def naming(kind: str, **changed: Any) -> Naming:
    plausible: dict[str, Any] = {"model": "m", "dtype": "float32", "block_tokens": 4, "namespace_id": ID}
    return make_naming(kind, **(plausible | changed))


def test_kvstores_own_are_those_of_the_namespace() -> None:
    namespace = Namespace(model="m", dtype="float32", block_tokens=4)
    assert naming("kvstore").block_keys(range(11)) == namespace.block_keys(range(11))


def test_vllms_are_the_id_and_what_vllm_hashes() -> None:
    """As vLLM 0.32 said for these tokens."""
    assert [key.hex() for key in naming("vllm").block_keys(range(9))] == [
        ID + "9da1c53089c000ad1a79a77c143b68dda00e2a85315bc1f690bbd03ba4a195dd",
        ID + "1c9b6c0620e875631f1c5395ed56f2243aa113f88fc842f04fbb0654074b8d43",
    ]


def test_another_seed_gives_other_keys() -> None:
    id_ = bytes.fromhex(ID)
    assert VllmNaming(id_, 4, seed="1").block_keys(range(4)) != VllmNaming(id_, 4).block_keys(range(4))


@pytest.mark.parametrize("kind", NAMINGS)
@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=30), block_tokens=st.integers(1, 5))
def test_one_after_the_other_they_are_the_same(kind: str, tokens: list[int], block_tokens: int) -> None:
    named = naming(kind, block_tokens=block_tokens)
    assert named.block_tokens == block_tokens
    before: bytes | None = None
    keys = []
    for start in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        before = named.following(before, tokens[start : start + block_tokens])
        keys.append(before)
    assert named.block_keys(tokens) == named.block_keys(np.array(tokens, np.int64)) == keys


@pytest.mark.parametrize("kind", NAMINGS)
def test_what_are_no_tokens_is_refused(kind: str) -> None:
    with pytest.raises(InvalidArgument):
        naming(kind).block_keys([2**40])


@pytest.mark.parametrize("namespace_id", ["", "0001", "xyz", ID + "00"])
def test_an_id_that_is_none_says_what_it_is(namespace_id: str) -> None:
    with pytest.raises(ConfigError, match="that the engine's connector logs, 32 hex digits, not "):
        naming("vllm", namespace_id=namespace_id)


def test_another_naming_is_not_known() -> None:
    with pytest.raises(ConfigError, match="one of kvstore, vllm, not 'sglang'"):
        naming("sglang")
