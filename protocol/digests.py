"""Digests of runs of blocks, for the incremental resync of a node's inventory (anti-entropy).

- A run is a range of a node's generations in which all blocks are in the same tiers.
- Its digest is the sum, modulo 2^64, of one number a block, a mix of generation, checksum and size.
- A generation is granted once, to one key of one tenant; so it stands for both.
- The node draws the seed, so that a writer cannot craft blocks whose numbers cancel out.
"""

from collections.abc import Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt

MAX_RUN: Final = 32
"""Blocks in a run. A digest takes 18 bytes; one different block makes the node send its whole run, 50 to 70 bytes a
block."""
Numbers = npt.NDArray[np.uint64]
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS: Final = np.uint64(30), np.uint64(27), np.uint64(31)


def numbers(seed: int, generations: Numbers, checksums: Numbers, sizes: Numbers) -> Numbers:
    """Return the number of each block: mix(mix(mix(generation ^ seed) ^ checksum) ^ size), mix being splitmix64's
    finalizer.
    """
    return _mix(_mix(_mix(generations ^ np.uint64(seed)) ^ checksums) ^ sizes)


def starts(tiers: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    """Return the index of each run's first block, for blocks by ascending generation with these tier masks.

    A run ends where the tier mask changes, and after MAX_RUN blocks.
    """
    changes = np.flatnonzero(tiers[1:] != tiers[:-1]) + 1
    alike = np.concatenate((np.zeros(min(len(tiers), 1), np.intp), changes))
    lengths = np.diff(np.append(alike, len(tiers)))
    parts = -(-lengths // MAX_RUN)
    within = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    return cast(npt.NDArray[np.intp], np.repeat(alike, parts) + within * MAX_RUN)


def run_of(firsts: Numbers, generations: Numbers) -> npt.NDArray[np.intp]:
    """Return the index of each generation's run, -1 below all of them.

    `firsts`: first generations of the runs, ascending.
    """
    return np.searchsorted(firsts, generations, side="right") - 1


def as_numbers(column: Sequence[int]) -> Numbers:
    return np.array(column, np.uint64)


def _mix(numbers: Numbers) -> Numbers:
    first, second, last = _SHIFTS
    numbers = (numbers ^ (numbers >> first)) * _FIRST
    numbers = (numbers ^ (numbers >> second)) * _SECOND
    return numbers ^ (numbers >> last)
