"""Encodes the store's block events in the forms that other routers read: MessagePack of [seconds, [event, ...], 0].

    vllm     maps, as vLLM 0.32 publishes them; a block's hash is its whole key; no token ids
    dynamo   maps; 64-bit hashes and token ids, without which Dynamo indexes no block: such blocks wait for their tokens
    llm-d    lists of members in order; 64-bit hashes; token ids if known, otherwise llm-d finds blocks by the engines'
    hashes

The store has no tokens. They come from registered engines that published blocks of the same keys. A 64-bit hash is the
end of the key; with naming vllm that equals what vLLM publishes with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES. Lost events
void what was published before: AllBlocksCleared.

Source: vLLM 0.32, distributed/kv_events.py; ai-dynamo/dynamo, lib/kv-router/src/zmq_wire; llm-d/llm-d-kv-cache,
pkg/kvevents.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import msgspec

from kvstore.engines.publisher.config import DYNAMO, LLM_D, VLLM
from kvstore.kvcache.traces.event_file import REMOVED, STORED, BlockEvent, LostEvents

MEDIUM: Final = {VLLM: "STORAGE", DYNAMO: "EXTERNAL", LLM_D: "CPU"}
"""Each reader's name for a medium that several engines reach. Dynamo of 2025 treats STORAGE as a GPU; llm-d weighs
only GPU and CPU."""
HASH_BYTES: Final = 8
MAX_WAITING_BLOCKS: Final = 8192
"""Blocks for Dynamo without known tokens: an engine's events may arrive after the node's."""
TokensOf: TypeAlias = Callable[[bytes], Sequence[int] | None]


class EventForm:
    """Encoder of event batches for one kind of reader. Not thread-safe."""

    def __init__(self, form: str, tokens_of: TokensOf = lambda key: None) -> None:
        """Create it. `form` is one of FORMS; `tokens_of` returns a block's token ids by key, None if unknown."""
        self._form = form
        self._tokens_of = tokens_of
        self._waiting: dict[bytes, BlockEvent] = {}
        """Stored blocks without known tokens, one event of one block by key."""

    def batch(self, events: Sequence[BlockEvent | LostEvents]) -> bytes | None:
        """Return the events as one batch, with the time of the last one; None if there is nothing to publish.

        Earlier blocks whose tokens have become known come first.
        """
        known = [key for key in self._waiting if self._tokens_of(key) is not None]
        happened = [*(self._waiting.pop(key) for key in known), *events]
        found = [each for event in happened for each in self._published(event)]
        return msgspec.msgpack.encode([happened[-1].timestamp_ms / 1000, found, 0]) if found else None

    def _published(self, event: BlockEvent | LostEvents) -> Iterator[dict[str, Any] | list[Any]]:
        if isinstance(event, LostEvents):
            self._waiting.clear()
            yield self._shaped({"type": "AllBlocksCleared"})
        elif event.kind == STORED:
            tokens = [None if self._form == VLLM else self._tokens_of(key) for key in event.keys]
            for start, end in _chains(event, tokens):
                if tokens[start] is not None or self._form != DYNAMO:
                    yield self._stored(event, start, [each or () for each in tokens[start:end]])
                else:
                    self._wait(event, start, end)
        elif event.kind == REMOVED:
            for key in event.keys:
                self._waiting.pop(key, None)
            yield self._shaped({"type": "BlockRemoved", "block_hashes": self._hashes(event.keys), "medium": MEDIUM[self._form]}, event.node)

    def _wait(self, event: BlockEvent, start: int, end: int) -> None:
        for index in range(start, end):
            each = slice(index, index + 1)
            self._waiting[event.keys[index]] = replace(
                event, keys=event.keys[each], parents=event.parents[each], sizes_bytes=event.sizes_bytes[each]
            )
        while len(self._waiting) > MAX_WAITING_BLOCKS:
            self._waiting.pop(next(iter(self._waiting)))

    def _stored(self, event: BlockEvent, start: int, tokens: Sequence[Sequence[int]]) -> dict[str, Any] | list[Any]:
        parent = self._hashes([event.parents[start]])[0] if event.parents[start] else None
        members = {
            "type": "BlockStored",
            "block_hashes": self._hashes(event.keys[start : start + len(tokens)]),
            "parent_block_hash": parent,
            "token_ids": [token for each in tokens for token in each],
            "block_size": len(tokens[0]),
            "lora_id": None,
            "medium": MEDIUM[self._form],
            "lora_name": None,
        }
        return self._shaped(members, event.node)

    def _hashes(self, keys: Sequence[bytes]) -> list[bytes] | list[int]:
        return list(keys) if self._form == VLLM else [int.from_bytes(key[-HASH_BYTES:], "big") for key in keys]

    def _shaped(self, members: dict[str, Any], node: str = "") -> dict[str, Any] | list[Any]:
        if self._form == LLM_D:
            return list(members.values())
        return members | {"ownership": node} if node else members


def _chains(event: BlockEvent, tokens: Sequence[Sequence[int] | None]) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of blocks that follow one another and have equally many known tokens, or all none."""
    start = 0
    for index in range(1, len(event.keys)):
        here, before = (len(each or ()) for each in (tokens[index], tokens[index - 1]))
        if event.parents[index] != event.keys[index - 1] or here != before:
            yield start, index
            start = index
    yield start, len(event.keys)
