"""Which instances hold which blocks, and so the longest prefix of a prompt at each: FindBestPrefixMatch. Pure bookkeeping."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class PrefixIndex(Generic[K]):
    """Blocks to the set of instances that hold them, a set being one integer with a bit an instance.

    An instance is a small number of the caller's choice, dense from 0. Not thread-safe. Memory: an entry a block that any of them holds.
    """

    def __init__(self) -> None:
        self._holders: dict[K, int] = {}

    def add(self, instance: int, keys: Iterable[K]) -> None:
        """`instance` holds these blocks now; those it held already are none the worse."""
        holders, bit = self._holders, 1 << instance
        for key in keys:
            holders[key] = holders.get(key, 0) | bit

    def remove(self, instance: int, keys: Iterable[K]) -> None:
        """`instance` holds these no longer; those it did not are ignored."""
        holders, keep = self._holders, ~(1 << instance)
        for key in keys:
            left = holders.get(key, 0) & keep
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)

    def forget(self, instance: int) -> None:
        """`instance` holds nothing any more. O(blocks)."""
        bit = 1 << instance
        self.remove(instance, [key for key, held in self._holders.items() if held & bit])

    def match(self, keys: Sequence[K], instances: int) -> list[int]:
        """The number of leading blocks of `keys` that each of the instances [0, instances) holds."""
        return leading_blocks(map(self._holders.get, keys), instances)

    def __len__(self) -> int:
        return len(self._holders)


def leading_blocks(holders: Iterable[int | None], instances: int) -> list[int]:
    """From the holders of a prompt's blocks, in order (None or 0: nobody), the length of the unbroken run at each of [0, instances)."""
    lengths = [0] * instances
    left, length = (1 << instances) - 1, 0
    for held in holders:
        lost = left & ~(held or 0)
        if lost:
            left ^= lost
            _enter(lengths, lost, length)
            if not left:
                return lengths
        length += 1
    _enter(lengths, left, length)
    return lengths


def _enter(lengths: list[int], instances: int, length: int) -> None:
    """Set the length of each instance whose bit is in `instances`."""
    while instances:
        lowest = instances & -instances
        lengths[lowest.bit_length() - 1] = length
        instances ^= lowest
