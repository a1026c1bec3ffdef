"""How much of a prompt each node has: the unbroken run of its leading blocks there. Pure; a question, and no access to any block."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.master.directory.locating import Indexes
from kvstore.master.directory.rows import Rows


@dataclass(frozen=True, slots=True)
class Prefixes:
    """`blocks` of the prompt from the first on, by node id, for the nodes that have any; `block_bytes` is what a block takes on average."""

    blocks: dict[int, int]
    block_bytes: int


def prefixes(rows: Rows, found: Indexes) -> Prefixes:
    """Of the prompt whose blocks are in the rows `found` (NO_ROW: nowhere), in order, at nodes that can be read from now.

    Most blocks of a prompt are at the same nodes, and have the same set of holders: a node loses its run at the first block with a set
    that it is not in. So the work is a sort of the sets' numbers, and a step in Python for each set there is.
    """
    held = np.frombuffer(rows.holders, np.uint32)[found]
    sets, first = np.unique(held, return_index=True)
    order = np.argsort(first)
    blocks: dict[int, int] = {}
    left = rows.sets.mask(int(held[0])) if len(held) else 0
    for index, begin in zip(sets[order].tolist(), first[order].tolist(), strict=True):
        lost = left & ~rows.sets.mask(index)
        if lost:
            left ^= lost
            blocks.update(dict.fromkeys(_bits(lost), begin))
            if not left:
                break
    blocks.update(dict.fromkeys(_bits(left), len(found)))
    longest = max(blocks.values(), default=0)
    sizes = np.frombuffer(rows.sizes, np.uint64)[found[:longest]]
    return Prefixes(blocks, int(sizes.mean()) if longest else 0)


def _bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
