"""Digests of runs of blocks: two sides that hold nearly the same compare them, and name only what differs.

A run is the blocks of one node whose generations are at or above that of its first and below that of the next run's, all in the same tiers.
Its sum is the sum, modulo 2^64, of a number a block that depends on generation, checksum and size. A generation is granted once by the
masters of a partition, to one key: it stands for tenant and key. Whoever begins draws the seed, so that nobody can put blocks whose
numbers are known to cancel out.
"""

from collections.abc import Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt

MAX_RUN: Final = 32
"""Blocks: a run takes 18 bytes, and what differs in one block is named with its whole run, 50 to 70 bytes each."""
Numbers = npt.NDArray[np.uint64]
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS: Final = np.uint64(30), np.uint64(27), np.uint64(31)


def numbers(seed: int, generations: Numbers, checksums: Numbers, sizes: Numbers) -> Numbers:
    """The number of each block: mix(mix(mix(generation ^ seed) ^ checksum) ^ size), where mix is the finalizer of splitmix64."""
    return _mix(_mix(_mix(generations ^ np.uint64(seed)) ^ checksums) ^ sizes)


def starts(tiers: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    """Where runs begin, of blocks by ascending generation: wherever the tier mask changes, and after MAX_RUN at the latest."""
    changes = np.flatnonzero(tiers[1:] != tiers[:-1]) + 1
    alike = np.concatenate((np.zeros(min(len(tiers), 1), np.intp), changes))
    lengths = np.diff(np.append(alike, len(tiers)))
    parts = -(-lengths // MAX_RUN)
    within = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    return cast(npt.NDArray[np.intp], np.repeat(alike, parts) + within * MAX_RUN)


def run_of(firsts: Numbers, generations: Numbers) -> npt.NDArray[np.intp]:
    """The run that each generation falls into; -1: it is below all of them. `firsts` ascend."""
    return np.searchsorted(firsts, generations, side="right") - 1


def as_numbers(column: Sequence[int]) -> Numbers:
    return np.array(column, np.uint64)


def _mix(numbers: Numbers) -> Numbers:
    first, second, last = _SHIFTS
    numbers = (numbers ^ (numbers >> first)) * _FIRST
    numbers = (numbers ^ (numbers >> second)) * _SECOND
    return numbers ^ (numbers >> last)
