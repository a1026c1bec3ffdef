"""Eviction of blocks that are stored as several values: a wrapper of any policy that evicts a block's values one after
the other.

A part of a block is useless. Engines that share blocks under any tensor parallelism store the KV heads of a block in
several values (docs/engines.md). The wrapped policy orders blocks as if each were one value, for all ranks.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain, islice
from typing import Final

from kvstore.tiers.policies.interface import EvictionPolicy

ID_BYTES: Final = 16
"""Bytes of the namespace id with which a value's key begins."""
MAX_LABELS: Final = 4096
"""Namespaces whose ids are cached as bytes."""


class BlockValues(EvictionPolicy[bytes]):
    """A policy over the keys of values. Keys inserted by `insert` are blocks of one value."""

    name = "block_values"

    def __init__(self, blocks: EvictionPolicy[bytes]) -> None:
        """`blocks` is the policy over blocks; its keys are blocks."""
        self._blocks = blocks
        self.has_pure_victim = blocks.has_pure_victim
        self._block_of: dict[bytes, bytes] = {}
        """Block of each value, for blocks of several values."""
        self._values: dict[bytes, tuple[bytes, ...]] = {}
        """Present values of each block of several values, in order of arrival, never empty. A set would take 160 bytes
        more.
        """

    def insert(self, key: bytes, parent: bytes | None = None) -> None:
        self._blocks.insert(key, parent)

    def insert_value(self, key: bytes, block: bytes, parent: bytes | None) -> None:
        """Insert a value of `block`, whose predecessor in the prompt is `parent`. A present value is touched."""
        if key in self._block_of:
            self.touch(key)
            return
        self._block_of[key] = block
        values = self._values.get(block, ())
        self._values[block] = (*values, key)
        if not values:
            self._blocks.insert(block, parent)

    def touch(self, key: bytes) -> None:
        """Count the first present value only: a read of a block reads all of its values."""
        block = self._block_of.get(key)
        if block is None:
            self._blocks.touch(key)
        elif self._values[block][0] == key:
            self._blocks.touch(block)

    def remove(self, key: bytes) -> None:
        """Remove a value. The block leaves the wrapped policy with its last value; until then it remains the next
        victim.
        """
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

    def release(self, key: bytes) -> None:
        if key in self._block_of:
            self.remove(key)
        else:
            self._blocks.release(key)

    def set_priority(self, key: bytes, priority: int) -> None:
        self._blocks.set_priority(self._block_of.get(key, key), priority)

    def expect_reuse(self, key: bytes, after_s: float) -> None:
        self._blocks.expect_reuse(self._block_of.get(key, key), after_s)

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

    def next_victims(self, count: int, evictable: Callable[[bytes], bool] = lambda key: True) -> list[bytes]:
        def present(block: bytes) -> Iterator[bytes]:
            return filter(evictable, reversed(self._values.get(block, (block,))))

        blocks = self._blocks.next_victims(count, lambda block: any(True for _ in present(block)))
        return list(islice(chain.from_iterable(map(present, blocks)), count))

    def worth(self, key: bytes) -> float | None:
        return self._blocks.worth(self._block_of.get(key, key))

    def close(self) -> int:
        return self._blocks.close()

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
    """Return the block that `key` is one of several values of, or None for a block of one value.

    `label` is the namespace under which the value was stored. For a block of several values it is the block's namespace
    id in hexadecimal, while each key begins with its value's own namespace id. The bytes behind that are the engine's
    hash of the block.
    """
    seed = _id(label) if is_of_values(label) and len(key) > ID_BYTES else None
    return None if seed is None or key.startswith(seed) else seed + key[ID_BYTES:]


def is_of_values(label: str) -> bool:
    """Return True if blocks of several values may be stored under that namespace."""
    return len(label) == 2 * ID_BYTES


@lru_cache(MAX_LABELS)
def _id(label: str) -> bytes | None:
    try:
        return bytes.fromhex(label)
    except ValueError:
        return None
