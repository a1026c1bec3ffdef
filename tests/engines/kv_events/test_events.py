"""Promises of events.py: vLLM's form and the older one are read, and all others are rejected.

The keys of blocks depend on their tokens, not on the engine's names for them.
"""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engines.kv_events.events import CPU, AllBlocksCleared, BlockHash, BlocksRemoved, BlocksStored, keys_of_stored, read_batch
from kvstore.kvcache.key_names import NamespaceNaming
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ProtocolError


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def stored(**changed: Any) -> dict[str, Any]:
    plausible = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": 10,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return plausible | changed


def test_events_of_todays_form() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [b"\1" * 32], "medium": "GPU", "group_idx": 0}
    assert read_batch(batch(stored(), removed, {"type": "AllBlocksCleared"})) == [
        BlocksStored([11, 12], 10, [1, 2, 3, 4], 2, True),
        BlocksRemoved([b"\1" * 32]),
        AllBlocksCleared(),
    ]


def test_events_of_the_older_form() -> None:
    found = read_batch(batch(["BlockStored", [7], None, [1, 2], 2, None], ["BlockRemoved", [7]], ["AllBlocksCleared"]))
    assert found == [BlocksStored([7], None, [1, 2], 2, True), BlocksRemoved([7]), AllBlocksCleared()]


def test_other_groups_unknown_media_and_kinds_are_passed_over() -> None:
    elsewhere = {"type": "BlockRemoved", "block_hashes": [1], "medium": "TAPE"}
    assert read_batch(batch(stored(medium="TAPE"), stored(group_idx=1), elsewhere, {"type": "Unheard"}, ["Unheard", 1])) == []


@pytest.mark.parametrize(("name", "medium"), [("CPU", "cpu"), ("CPU_PINNED", "cpu"), ("DISK", "disk"), ("EXTERNAL", "disk")])
def test_copies_in_a_lower_medium_may_have_no_tokens(name: str, medium: str) -> None:
    """vLLM's offloading names the blocks alone."""
    copied, removed = stored(medium=name, token_ids=[], block_size=0), {"type": "BlockRemoved", "block_hashes": [11], "medium": name}
    assert read_batch(batch(copied, removed)) == [BlocksStored([11, 12], 10, [], 0, True, medium=medium), BlocksRemoved([11], medium)]


def test_adapter_is_named() -> None:
    assert read_batch(batch(stored(lora_id=1, lora_name="a", extra_keys=[["a"], ["a"]]))) == [
        BlocksStored([11, 12], 10, [1, 2, 3, 4], 2, True, adapter="a")
    ]


@pytest.mark.parametrize(
    "changed",
    [{"lora_id": 1}, {"lora_name": "a", "extra_keys": [["a", "salt"], ["a"]]}, {"extra_keys": [None, ["salt"]]}, {"cache_salt": "s"}],
)
def test_what_depends_on_more_than_tokens_is_not_plain(changed: dict[str, Any]) -> None:
    [found] = read_batch(batch(stored(**changed)))
    assert isinstance(found, BlocksStored)
    assert not found.is_plain


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(5),
        msgspec.msgpack.encode([1.5]),
        batch(5),
        batch({}),
        batch([]),
        batch(stored(token_ids=[1, 2, 3])),
        batch(stored(token_ids=None)),
        batch(stored(block_size=0)),
        batch(stored(block_size="2")),
        batch(stored(block_hashes="ab")),
        batch(stored(block_hashes=["a", "b"])),
        batch(stored(parent_block_hash="a")),
        batch({"type": "BlockStored"}),
        batch({"type": "BlockRemoved"}),
        batch(["BlockStored", [7]]),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="no batch of KV events"):
        read_batch(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_refused(payload: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        read_batch(payload)


NAMING = NamespaceNaming(Namespace(model="m", dtype="float32", block_tokens=2))
TOKENS = [1, 2, 3, 4, 5, 6]
KEYS = NAMING.block_keys(TOKENS)
KNOWN: dict[BlockHash, bytes] = {10: KEYS[0]}


def named(stored: BlocksStored, *, adapter: str = "") -> list[tuple[BlockHash, bytes]]:
    return list(keys_of_stored(stored, NAMING, KNOWN.get, adapter=adapter))


def test_blocks_get_the_keys_of_their_tokens() -> None:
    assert named(BlocksStored([b"a", b"b"], None, TOKENS[:4], 2, True)) == [(b"a", KEYS[0]), (b"b", KEYS[1])]
    assert named(BlocksStored([11, 12], 10, TOKENS[2:], 2, True)) == [(11, KEYS[1]), (12, KEYS[2])]


def test_copies_without_tokens_keep_the_keys_that_are_known() -> None:
    assert named(BlocksStored([10, 99], None, [], 0, True, medium=CPU)) == [(10, KEYS[0])]


@pytest.mark.parametrize(
    "stored",
    [
        BlocksStored([11], 9, TOKENS[:2], 2, True),
        BlocksStored([11], None, TOKENS[:2], 2, False),
        BlocksStored([11], None, TOKENS[:3], 3, True),
        BlocksStored([11], None, TOKENS[:2], 2, True, adapter="a"),
    ],
)
def test_blocks_that_cannot_be_named_have_no_key(stored: BlocksStored) -> None:
    """Their parent is not known, they depend on more than tokens, are of another size, or of an adapter."""
    assert named(stored) == []


def test_blocks_of_the_adapter_that_is_asked_for_have_keys() -> None:
    assert named(BlocksStored([11], None, TOKENS[:2], 2, True, adapter="a"), adapter="a") == [(11, KEYS[0])]
