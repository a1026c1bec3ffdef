"""Promises of form.py: each reader's own definitions of events, written down here after theirs, decode what is published for it."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvstore.engines.kv_events.events import AllBlocksCleared, BlocksRemoved, BlocksStored, read_batch
from kvstore.engines.publisher import form as module
from kvstore.engines.publisher.config import DYNAMO, FORMS, LLM_D, VLLM
from kvstore.engines.publisher.form import EventForm
from kvstore.kvcache.key_names import VllmNaming
from kvstore.kvcache.namespace import ID_BYTES
from kvstore.kvcache.traces.event_file import READ, REMOVED, STORED, BlockEvent, LostEvents

NAMING = VllmNaming(bytes(ID_BYTES), 2)
TOKENS = [1, 2, 3, 4, 5, 6]
KEYS = NAMING.block_keys(TOKENS)
HASHES = [int.from_bytes(key[-8:], "big") for key in KEYS]


class DynamoStored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=False):
    """`RawKvEvent::BlockStored` of Dynamo: hashes of 64 bits, tokens of 32, no size below 0."""

    block_hashes: list[int]
    token_ids: list[int]
    block_size: int
    parent_block_hash: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class DynamoRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class DynamoCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


DynamoBatch = tuple[float, list[DynamoStored | DynamoRemoved | DynamoCleared], int | None]


class LlmdStored(msgspec.Struct, tag="BlockStored", array_like=True):
    """Positions 0 to 8 that llm-d's adapter for vLLM takes; those after 4 may be absent."""

    block_hashes: list[int | bytes]
    parent_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


class LlmdRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[int | bytes]
    medium: str | None = None


class LlmdCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


LlmdBatch = tuple[float, list[LlmdStored | LlmdRemoved | LlmdCleared], int | None]


def event(kind: str, keys: list[bytes], parents: list[bytes]) -> BlockEvent:
    return BlockEvent(kind, 1500.0, "n0", "t", keys, parents, [1] * len(keys))


def published(form: str, events: Sequence[BlockEvent | LostEvents], known: Sequence[int] = (0, 1, 2)) -> bytes:
    """`known`: blocks of the prompt whose tokens an engine has published."""
    tokens = {KEYS[index]: TOKENS[2 * index : 2 * index + 2] for index in known}
    payload = EventForm(form, tokens.get).batch(events)
    assert payload is not None
    return payload


PROMPT = event(STORED, KEYS, [b"", KEYS[0], KEYS[1]])
ALL: list[BlockEvent | LostEvents] = [PROMPT, event(REMOVED, KEYS[2:], [KEYS[1]]), LostEvents(2000.0, "n0", "t", None)]


def test_blocks_that_follow_one_another_are_one_event() -> None:
    stored = event(STORED, [b"a", b"b", b"c", b"d"], [b"", b"a", b"x", b"c"])
    payload = EventForm(VLLM).batch([stored, event(REMOVED, [b"a"], [b""])])
    assert payload is not None
    seconds, found, rank = msgspec.msgpack.decode(payload)
    assert (seconds, rank) == (1.5, 0)
    assert [(each["type"], each["block_hashes"], each.get("parent_block_hash")) for each in found] == [
        ("BlockStored", [b"a", b"b"], None),
        ("BlockStored", [b"c", b"d"], b"x"),
        ("BlockRemoved", [b"a"], None),
    ]
    assert {each["medium"] for each in found} == {"STORAGE"}
    assert {each["ownership"] for each in found} == {"n0"}


def test_gap_voids_what_was_before() -> None:
    assert msgspec.msgpack.decode(published(VLLM, [ALL[2]])) == [2.0, [{"type": "AllBlocksCleared"}], 0]


def test_reads_are_not_published() -> None:
    assert EventForm(VLLM).batch([event(READ, [b"a"], [b""])]) is None


def test_dynamo_decodes_what_is_published_for_it() -> None:
    _, found, rank = msgspec.msgpack.decode(published(DYNAMO, ALL), type=DynamoBatch)
    assert found == [
        DynamoStored(block_hashes=HASHES, token_ids=TOKENS, block_size=2, medium="EXTERNAL"),
        DynamoRemoved(HASHES[2:], "EXTERNAL"),
        DynamoCleared(),
    ]
    assert rank == 0


def dynamo_events(payload: bytes | None) -> list[DynamoStored | DynamoRemoved | DynamoCleared]:
    assert payload is not None
    _, found, _ = msgspec.msgpack.decode(payload, type=DynamoBatch)
    events: list[DynamoStored | DynamoRemoved | DynamoCleared] = found
    return events


def test_blocks_wait_for_their_tokens_for_dynamo() -> None:
    """It indexes a block by its tokens, and an engine's events may arrive after the node's."""
    tokens = {KEYS[0]: TOKENS[:2]}
    form = EventForm(DYNAMO, tokens.get)
    [first] = dynamo_events(form.batch([PROMPT]))
    assert first == DynamoStored(block_hashes=HASHES[:1], token_ids=TOKENS[:2], block_size=2, medium="EXTERNAL")
    assert form.batch([]) is None
    tokens |= {KEYS[1]: TOKENS[2:4], KEYS[2]: TOKENS[4:]}
    late = dynamo_events(form.batch([]))
    assert late == [DynamoStored([HASHES[index]], TOKENS[2 * index : 2 * index + 2], 2, HASHES[index - 1], "EXTERNAL") for index in (1, 2)]
    assert form.batch([]) is None


@pytest.mark.parametrize("after", [event(REMOVED, KEYS, [b"", *KEYS[:2]]), LostEvents(2000.0, "n0", "t", None)])
def test_blocks_that_are_gone_wait_no_longer(after: BlockEvent | LostEvents) -> None:
    tokens: dict[bytes, list[int]] = {}
    form = EventForm(DYNAMO, tokens.get)
    assert form.batch([PROMPT]) is None
    form.batch([after])
    tokens[KEYS[0]] = TOKENS[:2]
    assert form.batch([]) is None


def test_oldest_blocks_wait_no_longer_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BLOCKS", 2)
    tokens: dict[bytes, list[int]] = {}
    form = EventForm(DYNAMO, tokens.get)
    assert form.batch([PROMPT]) is None
    tokens |= {KEYS[0]: TOKENS[:2], KEYS[1]: TOKENS[2:4]}
    [found] = dynamo_events(form.batch([]))
    assert isinstance(found, DynamoStored)
    assert found.block_hashes == HASHES[1:2]


def test_llm_d_decodes_what_is_published_for_it() -> None:
    """Blocks of unknown tokens have none: llm-d takes them for copies of what engines published under the same hashes."""
    _, found, _ = msgspec.msgpack.decode(published(LLM_D, ALL, known=[0, 1]), type=LlmdBatch)
    assert found == [
        LlmdStored([*HASHES[:2]], None, TOKENS[:4], 2, None, "CPU"),
        LlmdStored([*HASHES[2:]], HASHES[1], [], 0, None, "CPU"),
        LlmdRemoved([*HASHES[2:]], "CPU"),
        LlmdCleared(),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_our_own_reader_takes_every_form(form: str) -> None:
    stored, removed, cleared = read_batch(published(form, ALL))
    assert isinstance(stored, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert cleared == AllBlocksCleared()
    assert len(stored.hashes) == 3
