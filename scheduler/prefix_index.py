"""Which instances hold which blocks, and so the longest prefix of a prompt at each: FindBestPrefixMatch. Pure bookkeeping."""

from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
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
        before, after = 0, bit
        for key in keys:
            held = holders.get(key, 0)
            # Blocks of a prompt are mostly held by the same instances: as one object for all of them they are matched in half the time.
            if held is not before:
                before, after = held, held | bit
            holders[key] = after

    def remove(self, instance: int, keys: Iterable[K]) -> None:
        """`instance` holds these no longer; those it did not are ignored."""
        holders, keep = self._holders, ~(1 << instance)
        for key in keys:
            left = holders.get(key, 0) & keep
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)

    def match(self, keys: Sequence[K], instances: int) -> list[int]:
        """The number of leading blocks of `keys` that each of the instances [0, instances) holds."""
        return leading_blocks(map(self._holders.get, keys, repeat(0)), instances)

    def __len__(self) -> int:
        return len(self._holders)


def leading_blocks(holders: Iterable[int], instances: int) -> list[int]:
    """From the holders of a prompt's blocks, in order (0: nobody), the length of the unbroken run at each of [0, instances).

    Reads no further than the longest run.
    """
    lengths = [0] * instances
    left = before = (1 << instances) - 1
    length = 0
    for held in holders:
        if held is not before:
            before = held
            kept = left & held
            if kept != left:
                _enter(lengths, left ^ kept, length)
                left = kept
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
