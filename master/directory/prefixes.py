"""How much of a prompt each node has: the unbroken run of its leading blocks there. Pure; a question, and no access to any block."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvstore.master.directory.locating import Indexes
from kvstore.master.directory.rows import Rows


@dataclass(frozen=True, slots=True)
class Prefixes:
    """`blocks` of the prompt from the first on, by node id, for the nodes that have any; `block_bytes` is what a block takes on average."""

    blocks: dict[int, int]
    block_bytes: int


class Part(NamedTuple):
    """The blocks of a prompt that one table knows of: its rows `found` (NO_ROW: nowhere), which are the prompt's blocks `places`."""

    rows: Rows
    found: Indexes
    places: Sequence[int]


PART_BITS: Final = 32
"""Of the number of a set of holders, above which that of its table stands."""


def prefixes(parts: Sequence[Part]) -> Prefixes:
    """Of the prompt whose blocks are in these tables, at nodes that can be read from now.

    Most blocks of a prompt are at the same nodes, and have the same set of holders: a node loses its run at the first block with a set
    that it is not in. So the work is a sort of the sets' numbers, and a step in Python for each set there is.
    """
    count = sum(len(part.places) for part in parts)
    held, sizes = np.zeros(count, np.uint64), np.zeros(count, np.uint64)
    for number, (rows, found, places) in enumerate(parts):
        at = np.fromiter(places, np.intp, len(places))
        held[at] = np.frombuffer(rows.holders, np.uint32)[found].astype(np.uint64) + np.uint64(number << PART_BITS)
        sizes[at] = np.frombuffer(rows.sizes, np.uint64)[found]

    def mask(index: int) -> int:
        return parts[index >> PART_BITS].rows.sets.mask(index & ((1 << PART_BITS) - 1))

    sets, first = np.unique(held, return_index=True)
    order = np.argsort(first)
    blocks: dict[int, int] = {}
    left = mask(int(held[0])) if count else 0
    for index, begin in zip(sets[order].tolist(), first[order].tolist(), strict=True):
        lost = left & ~mask(index)
        if lost:
            left ^= lost
            blocks.update(dict.fromkeys(_bits(lost), begin))
            if not left:
                break
    blocks.update(dict.fromkeys(_bits(left), count))
    longest = max(blocks.values(), default=0)
    return Prefixes(blocks, int(sizes[:longest].mean()) if longest else 0)


def _bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
