"""Keys of the blocks that an engine's event names. Pure.

An engine names its blocks by hashes of its own. Each gets the key that follows its parent's key, by its tokens: so both 64-bit hashes and
whole ones will do.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from kvstore.engines.kv_events.events import BlockHash, Stored
from kvstore.kvcache.naming import Naming

KeyOf: TypeAlias = Callable[[BlockHash], bytes | None]


def keys_of_stored(stored: Stored, naming: Naming, key_of: KeyOf, *, adapter: str = "") -> Iterator[tuple[BlockHash, bytes]]:
    """Name and key of each block of the event that has one; `key_of` gives those named before.

    Blocks of another adapter or another size have no key, nor have those that depend on more than tokens, or follow an unknown block.
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
