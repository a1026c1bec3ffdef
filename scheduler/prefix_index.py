"""Index from blocks to the instances that hold them, for the longest prefix of a prompt at each (FindBestPrefixMatch).
Pure."""

from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class PrefixIndex(Generic[K]):
    """Set of holding instances per block, as a bit mask.

    An instance is a small number chosen by the caller, dense from 0. Not thread-safe. Memory: an entry per block held
    anywhere.
    """

    def __init__(self) -> None:
        self._holders: dict[K, int] = {}

    def add(self, instance: int, keys: Iterable[K]) -> None:
        """`instance` holds these blocks now; repeated additions have no effect."""
        holders, bit = self._holders, 1 << instance
        before, after = 0, bit
        for key in keys:
            held = holders.get(key, 0)
            # Blocks of a prompt mostly have the same holders: sharing one int object halves the time of matching.
            if held is not before:
                before, after = held, held | bit
            holders[key] = after

    def remove(self, instance: int, keys: Iterable[K]) -> None:
        """`instance` holds these blocks no longer; unknown ones are ignored."""
        holders, keep = self._holders, ~(1 << instance)
        for key in keys:
            left = holders.get(key, 0) & keep
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)

    def match(self, keys: Sequence[K], instances: int) -> list[int]:
        """Number of leading blocks of `keys` held by each of the instances [0, instances)."""
        return leading_blocks(map(self._holders.get, keys, repeat(0)), instances)

    def __len__(self) -> int:
        return len(self._holders)


def leading_blocks(holders: Iterable[int], instances: int) -> list[int]:
    """Length of the unbroken run at each of [0, instances), from the holders of a prompt's blocks in order (0: none).

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
