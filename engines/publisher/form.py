"""Events of the store's blocks in the form of vLLM's KV events: MessagePack of [seconds, [event, ...], 0], an event a map with `type`.

A block's hash is its key, whole; the store knows no tokens, so `token_ids` is empty and `block_size` 0. `medium` is STORAGE, and
`ownership` the node that has the block. A gap voids what was published before: AllBlocksCleared.

Source: vLLM 0.32, distributed/kv_events.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from kvstore.kvcache.traces.event_file import REMOVED, STORED, BlockEvent, Gap

MEDIUM: Final = "STORAGE"


def batch(events: Sequence[BlockEvent | Gap]) -> bytes | None:
    """One batch, at the time of its last event; None if nothing in it concerns where blocks are."""
    found = [each for event in events for each in _published(event)]
    return msgspec.msgpack.encode([events[-1].timestamp_ms / 1000, found, 0]) if found else None


def _published(event: BlockEvent | Gap) -> Iterator[dict[str, Any]]:
    if isinstance(event, Gap):
        yield {"type": "AllBlocksCleared"}
    elif event.kind == STORED:
        for start, end in _chains(event):
            yield {
                "type": "BlockStored",
                "block_hashes": list(event.keys[start:end]),
                "parent_block_hash": event.parents[start] or None,
                "token_ids": [],
                "block_size": 0,
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": None,
                "ownership": event.node,
            }
    elif event.kind == REMOVED:
        yield {"type": "BlockRemoved", "block_hashes": list(event.keys), "medium": MEDIUM, "ownership": event.node}


def _chains(event: BlockEvent) -> Iterator[tuple[int, int]]:
    """[start, end) of blocks each of which follows the one before."""
    start = 0
    for index in range(1, len(event.keys)):
        if event.parents[index] != event.keys[index - 1]:
            yield start, index
            start = index
    yield start, len(event.keys)
