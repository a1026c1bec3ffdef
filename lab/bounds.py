"""What no policy can exceed on a trace: the infinite cache, and Belady's choice with bypass. No policies: both know the future.

Both count hits at any position of a prompt. A prefix hit is such a hit, and a prompt's leading run is read before anything of the prompt
is stored, so they bound the prefix hit ratio too, in either order of storing (replay.py). At small capacities that bound is loose: hits
behind a miss, which Belady collects, are worth nothing to an engine.
"""

import heapq

import numpy as np

from kvstore.lab.accesses import Accesses
from kvstore.lab.replay import check_capacity


def infinite_hits(accesses: Accesses) -> int:
    """Uses of blocks used before. Where equal ids are equal prefixes all of them are prefix hits."""
    return len(accesses) - accesses.unique


def belady_hits(accesses: Accesses, capacity_blocks: int) -> int:
    """The most hits that `capacity_blocks` blocks can give when a missing block need not be stored. O(n log n).

    A missing block is stored if it is used again sooner than the resident one used again last, which leaves for it.
    Source: Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 1966, with the newcomer among
    those that may leave. Raises InvalidArgument for no capacity.
    """
    check_capacity(capacity_blocks)
    never = len(accesses)
    next_use = np.where(accesses.next < 0, never, accesses.next).tolist()
    blocks = accesses.blocks.tolist()
    resident: set[int] = set()
    latest: list[tuple[int, int]] = []
    """Heap of (-next use, block). Entries of uses that are past stay: they lie below those of any resident block."""
    hits = 0
    for block, soon in zip(blocks, next_use, strict=True):
        if block in resident:
            hits += 1
            if soon == never:
                resident.remove(block)
                continue
        elif soon == never or (len(resident) == capacity_blocks and not _displace(resident, latest, soon)):
            continue
        resident.add(block)
        heapq.heappush(latest, (-soon, block))
    return hits


def _displace(resident: set[int], latest: list[tuple[int, int]], soon: int) -> bool:
    """Have the block used again last leave, if that is later than `soon`."""
    if -latest[0][0] < soon:
        return False
    resident.remove(heapq.heappop(latest)[1])
    return True
