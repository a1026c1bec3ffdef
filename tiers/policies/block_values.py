"""Eviction of blocks that are stored in several values: any policy over blocks, which evicts the values of a block one after the other.

A part of a block is worth nothing. Engines that share blocks under any tensor parallelism store the KV heads of a block in several values
(docs/engines.md); the policy beneath orders blocks, as if each were one value, whichever rank of whichever engine stored or reads it.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from kvstore.tiers.policies.interface import EvictionPolicy

ID_BYTES: Final = 16
"""Of the id of a namespace, with which the key of a value begins."""
MAX_LABELS: Final = 4096
"""Namespaces of values whose ids are kept as bytes."""


class BlockValues(EvictionPolicy[bytes]):
    """A policy over the keys of values. Keys that were inserted by `insert` are blocks of one value."""

    name = "block_values"

    def __init__(self, blocks: EvictionPolicy[bytes]) -> None:
        """`blocks` is the policy over blocks, with its keys as blocks of one value."""
        self._blocks = blocks
        self._block_of: dict[bytes, bytes] = {}
        """Of each value of a block of several."""
        self._values: dict[bytes, tuple[bytes, ...]] = {}
        """Of each block of several values those that are present, the first one first; at least one. A set would take 160 bytes more."""

    def insert(self, key: bytes, parent: bytes | None = None) -> None:
        self._blocks.insert(key, parent)

    def insert_value(self, key: bytes, block: bytes, parent: bytes | None) -> None:
        """A new value of `block`, which `parent` is before in its prompt. One already present is a touch."""
        if key in self._block_of:
            self.touch(key)
            return
        self._block_of[key] = block
        values = self._values.get(block, ())
        self._values[block] = (*values, key)
        if not values:
            self._blocks.insert(block, parent)

    def touch(self, key: bytes) -> None:
        """A read of a block reads all its values: the first one of those present counts."""
        block = self._block_of.get(key)
        if block is None:
            self._blocks.touch(key)
        elif self._values[block][0] == key:
            self._blocks.touch(block)

    def remove(self, key: bytes) -> None:
        """A block leaves the policy beneath with its last value: until then it is the next victim again."""
        block = self._block_of.pop(key, None)
        if block is None:
            self._blocks.remove(key)
            return
        left = tuple(other for other in self._values[block] if other != key)
        if left:
            self._values[block] = left
        else:
            del self._values[block]
            self._blocks.remove(block)

    def victim(self, evictable: Callable[[bytes], bool] = lambda key: True) -> bytes | None:
        chosen: dict[bytes, bytes] = {}

        def has_evictable(block: bytes) -> bool:
            for key in reversed(self._values.get(block, (block,))):
                if evictable(key):
                    chosen[block] = key
                    return True
            return False

        block = self._blocks.victim(has_evictable)
        return chosen[block] if block is not None else None

    @property
    def remembered(self) -> int:
        return self._blocks.remembered

    def forget(self, count: int) -> None:
        self._blocks.forget(count)

    def __len__(self) -> int:
        return len(self._blocks) - len(self._values) + len(self._block_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._block_of or (key not in self._values and key in self._blocks)

    def check_integrity(self) -> None:
        self._blocks.check_integrity()
        assert all(self._values.values())
        assert self._block_of == {key: block for block, values in self._values.items() for key in values}
        assert all(block in self._blocks for block in self._values)


def block_of_value(label: str, key: bytes) -> bytes | None:
    """Return the block that `key` is one of several values of; None for a block of one value.

    `label` is the namespace that the value was stored under. That of a block's values together is the id of a namespace of their block, in
    hexadecimal digits; each key begins with the id of its value's own namespace. The bytes behind that are the engine's hash of the block.
    """
    seed = _id(label) if is_of_values(label) and len(key) > ID_BYTES else None
    return None if seed is None or key.startswith(seed) else seed + key[ID_BYTES:]


def is_of_values(label: str) -> bool:
    """Whether blocks of several values may be stored under that namespace."""
    return len(label) == 2 * ID_BYTES


@lru_cache(MAX_LABELS)
def _id(label: str) -> bytes | None:
    try:
        return bytes.fromhex(label)
    except ValueError:
        return None
