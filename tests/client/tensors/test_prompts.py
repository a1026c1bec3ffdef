"""Promises of prompts.py: what names the blocks of a sequence."""

from dataclasses import replace

from kvstore.client.tensors.parts import ValueShape, value_parts
from kvstore.client.tensors.prompts import BlockHashes, PromptSequence, flat, keys_of
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace

SPEC = CacheSpec(layers=2, kv_heads=2, head_dim=8, block_tokens=4)
BASE = Namespace(model="m", dtype="bfloat16", block_tokens=4)
PARTS = value_parts(SPEC, BASE, layers=range(2), heads=range(2), shape=ValueShape())
TOKENS = list(range(13))


def test_tokens_give_a_key_a_value_of_each_full_block() -> None:
    keys = keys_of(PromptSequence(TOKENS), PARTS)
    assert keys == list(zip(*(part.namespace.block_keys(TOKENS) for part in PARTS), strict=True))
    assert len(keys) == 3


def test_extras_change_the_keys_from_their_block_on() -> None:
    plain, with_extras = (keys_of(PromptSequence(TOKENS, extras=extras), PARTS) for extras in (None, {1: b"image"}))
    assert plain[0] == with_extras[0]
    assert all(one != other for one, other in zip(plain[1], with_extras[1], strict=True))
    assert plain[2] != with_extras[2], "what follows depends on it"


def test_an_engine_s_hashes_are_keys_of_the_values_namespaces() -> None:
    hashes = [b"a" * 32, b"b" * 32]
    assert keys_of(PromptSequence(BlockHashes(hashes)), PARTS) == [tuple(part.namespace.id + name for part in PARTS) for name in hashes]
    other = value_parts(SPEC, replace(BASE, salt="s"), layers=range(2), heads=range(2), shape=ValueShape())
    assert not set(flat(keys_of(PromptSequence(BlockHashes(hashes)), other))) & set(
        flat(keys_of(PromptSequence(BlockHashes(hashes)), PARTS))
    )
