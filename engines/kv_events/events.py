"""KV events of vLLM and SGLang, and keys of the blocks in them. Pure functions.

**Messages.** An event reports which blocks an engine stored or removed, and in which medium. A batch is MessagePack:
[time, [event, ...], data-parallel rank]. An event is a map with `type` and named members or, in the form of 2025, a
list of the type and the members in order. Unused members, unknown kinds of events and unknown media are ignored.

**Keys.** An engine names blocks by hashes of its own, of 64 bits or longer. Each block's key is computed from its
parent's key and its tokens, so the hashes need not match.

Source: vLLM 0.32, distributed/kv_events.py; SGLang 0.5.23, srt/disaggregation/kv_events.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from kvstore.kvcache.key_names import Naming
from kvstore.protocol.errors import ProtocolError

BlockHash: TypeAlias = int | bytes
"""An engine's name of a block: its whole hash, or 64 bits of it."""
GPU: Final = "gpu"
"""The engine's own memory, on any device."""
CPU: Final = "cpu"
DISK: Final = "disk"
MEDIA: Final = {None: GPU, "GPU": GPU, "DEVICE": GPU} | {
    name: medium
    for medium, names in (
        (CPU, ("CPU", "CPU_PINNED", "CPU_TIER1")),
        (DISK, ("CPU_TIER2", "DISK", "NVME", "STORAGE", "EXTERNAL")),
    )
    for name in names
}
"""Medium by its name in events: of vLLM, of SGLang's `StorageMedium`, and of offloading layers."""
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
"""Members of BlockRemoved, like STORED in the order of the list form."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that are now in the medium. Each follows the previous one; the first follows `parent` (None: it starts
    a prompt)."""

    hashes: list[BlockHash]
    parent: BlockHash | None
    token_ids: list[int]
    """Empty for blocks that were copied to a lower medium: their names identify them."""
    block_tokens: int
    is_plain: bool
    """The blocks depend only on tokens and adapter, not on images or a salt."""
    adapter: str = ""
    """Name of the LoRA adapter; empty: none."""
    medium: str = GPU


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that left the medium."""

    hashes: list[BlockHash]
    medium: str = GPU


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine has no blocks any more."""


Event: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared


def read_batch(payload: bytes) -> list[Event]:
    """Return the events of a batch for the engine's first group of layers. Raises ProtocolError."""
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
                if medium := _medium(named):
                    yield _stored(named, medium)
            case "BlockRemoved":
                named = _named(members, REMOVED)
                if medium := _medium(named):
                    yield BlocksRemoved(_hashes(named["block_hashes"]), medium)
            case "AllBlocksCleared":
                yield AllBlocksCleared()


def _named(members: Any, names: Sequence[str]) -> dict[str, Any]:
    return members if isinstance(members, dict) else dict(zip(names, members, strict=False))


def _medium(members: dict[str, Any]) -> str:
    """Return the medium; "" if the event is ignored. With several groups of layers only the first group's blocks
    count."""
    return "" if members.get("group_idx") else MEDIA.get(members.get("medium"), "")


def _stored(members: dict[str, Any], medium: str) -> BlocksStored:
    hashes, parent, tokens, size = (members[name] for name in STORED[:4])
    is_copied = medium != GPU and tokens == []
    if not is_copied and (not isinstance(tokens, list) or not isinstance(size, int) or size < 1 or len(tokens) != size * len(hashes)):
        raise ValueError(f"blocks of {size!r} tokens do not have these tokens")
    adapter = members.get("lora_name") or ""
    has_unnamed_adapter = members.get("lora_id") is not None and not adapter
    others = [key for keys in members.get("extra_keys") or () for key in keys or () if key != adapter]
    parent = None if parent is None else _hashes([parent])[0]
    is_plain = not others and not has_unnamed_adapter and not members.get("cache_salt")
    return BlocksStored(_hashes(hashes), parent, tokens, size, is_plain, str(adapter), medium)


def _hashes(found: Any) -> list[BlockHash]:
    if not isinstance(found, list) or not all(isinstance(each, (int, bytes)) for each in found):
        raise ValueError("hashes of blocks are integers or bytes")
    return found


KeyOf: TypeAlias = Callable[[BlockHash], bytes | None]


def keys_of_stored(stored: BlocksStored, naming: Naming, key_of: KeyOf, *, adapter: str = "") -> Iterator[tuple[BlockHash, bytes]]:
    """Yield name and key of each block of the event that has a key. `key_of` returns keys of blocks that were named
    before.

    Blocks of another adapter or block size have no key, nor do blocks that depend on more than tokens or follow an
    unknown block.
    """
    if not stored.token_ids:
        yield from ((name, key) for name in stored.hashes if (key := key_of(name)) is not None)
        return
    size = stored.block_tokens
    if not stored.is_plain or stored.adapter != adapter or size != naming.block_tokens:
        return
    parent = None
    if stored.parent is not None:
        parent = key_of(stored.parent)
        if parent is None:
            return
    for index, name in enumerate(stored.hashes):
        parent = naming.following(parent, stored.token_ids[index * size : (index + 1) * size])
        yield name, parent
