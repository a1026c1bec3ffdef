"""KV events as vLLM publishes them, and SGLang in the older form: what came into an engine's own memory, and what left it.

A batch is MessagePack: [time, [event, ...], data-parallel rank]. An event is a map with `type` and named members, or, in the older form, a
list of the type and the members in order. Members that are not needed here are passed over, and so are kinds of events that are not known.

Source: vLLM 0.32, distributed/kv_events.py; SGLang 0.5, disaggregation/kv_events.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from kvstore.protocol.errors import ProtocolError

BlockHash: TypeAlias = int | bytes
"""An engine's own name of a block: all of its hash, or 64 bits of it."""
OWN_MEDIA: Final = (None, "GPU")
"""Where an engine's own memory is; what it offloads elsewhere has events, too."""
STORED: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
REMOVED: Final = ("block_hashes", "medium", "group_idx")
"""Members in the order of the older form."""


@dataclass(frozen=True, slots=True)
class Stored:
    """These blocks are in the engine's memory now, one after the other, the first of them after `parent` (None: at the beginning)."""

    hashes: list[BlockHash]
    parent: BlockHash | None
    token_ids: list[int]
    block_tokens: int
    is_plain: bool
    """They depend on nothing but their tokens: no adapter, image or salt."""


@dataclass(frozen=True, slots=True)
class Removed:
    """These are there no more."""

    hashes: list[BlockHash]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is there any more."""


Event: TypeAlias = Stored | Removed | Cleared


def read_batch(payload: bytes) -> list[Event]:
    """The events of a batch that concern the engine's own memory and its first group of layers. Raises ProtocolError."""
    try:
        batch = msgspec.msgpack.decode(payload)
        return list(_events(batch[1]))
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise ProtocolError(f"no batch of KV events: {error!r}") from None


def _events(found: Sequence[Any]) -> Iterator[Event]:
    for each in found:
        kind, members = (each["type"], each) if isinstance(each, dict) else (each[0], each[1:])
        match kind:
            case "BlockStored":
                named = _named(members, STORED)
                if _is_own(named):
                    yield _stored(named)
            case "BlockRemoved":
                named = _named(members, REMOVED)
                if _is_own(named):
                    yield Removed(_hashes(named["block_hashes"]))
            case "AllBlocksCleared":
                yield Cleared()


def _named(members: Any, names: Sequence[str]) -> dict[str, Any]:
    return members if isinstance(members, dict) else dict(zip(names, members, strict=False))


def _is_own(members: dict[str, Any]) -> bool:
    """A model with several groups of layers has a block of each; the first one stands for all."""
    return members.get("medium") in OWN_MEDIA and not members.get("group_idx")


def _stored(members: dict[str, Any]) -> Stored:
    hashes, parent, tokens, size = (members[name] for name in STORED[:4])
    if not isinstance(tokens, list) or not isinstance(size, int) or size < 1 or len(tokens) != size * len(hashes):
        raise ValueError(f"blocks of {size!r} tokens do not have these tokens")
    depends = [members.get("lora_id"), members.get("lora_name"), *(members.get("extra_keys") or ())]
    return Stored(_hashes(hashes), None if parent is None else _hashes([parent])[0], tokens, size, not any(depends))


def _hashes(found: Any) -> list[BlockHash]:
    if not isinstance(found, list) or not all(isinstance(each, (int, bytes)) for each in found):
        raise ValueError("hashes of blocks are integers or bytes")
    return found
