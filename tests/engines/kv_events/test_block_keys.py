"""Promises of block_keys.py: blocks get the keys of their tokens, whatever the engine calls them."""

import pytest

from kvstore.engines.kv_events.block_keys import keys_of_stored
from kvstore.engines.kv_events.events import CPU, BlockHash, Stored
from kvstore.kvcache.namespace import Namespace
from kvstore.kvcache.naming import NamespaceNaming

NAMING = NamespaceNaming(Namespace(model="m", dtype="float32", block_tokens=2))
TOKENS = [1, 2, 3, 4, 5, 6]
KEYS = NAMING.block_keys(TOKENS)
KNOWN: dict[BlockHash, bytes] = {10: KEYS[0]}


def named(stored: Stored, *, adapter: str = "") -> list[tuple[BlockHash, bytes]]:
    return list(keys_of_stored(stored, NAMING, KNOWN.get, adapter=adapter))


def test_blocks_get_the_keys_of_their_tokens() -> None:
    assert named(Stored([b"a", b"b"], None, TOKENS[:4], 2, True)) == [(b"a", KEYS[0]), (b"b", KEYS[1])]
    assert named(Stored([11, 12], 10, TOKENS[2:], 2, True)) == [(11, KEYS[1]), (12, KEYS[2])]


def test_copies_without_tokens_keep_the_keys_that_are_known() -> None:
    assert named(Stored([10, 99], None, [], 0, True, medium=CPU)) == [(10, KEYS[0])]


@pytest.mark.parametrize(
    "stored",
    [
        Stored([11], 9, TOKENS[:2], 2, True),
        Stored([11], None, TOKENS[:2], 2, False),
        Stored([11], None, TOKENS[:3], 3, True),
        Stored([11], None, TOKENS[:2], 2, True, adapter="a"),
    ],
)
def test_blocks_that_cannot_be_named_have_no_key(stored: Stored) -> None:
    """Their parent is not known, they depend on more than tokens, are of another size, or of an adapter."""
    assert named(stored) == []


def test_blocks_of_the_adapter_that_is_asked_for_have_keys() -> None:
    assert named(Stored([11], None, TOKENS[:2], 2, True, adapter="a"), adapter="a") == [(11, KEYS[0])]
