"""A trace's uses of blocks as arrays, and what follows from them alone: reuse distances, working set, bounds of any policy's hits.

Bounds are the infinite cache, and Belady's choice with bypass. Both know the future, and count hits at any position of a prompt. A prefix
hit is such a hit, and a prompt's leading run is read before anything of the prompt is stored, so they bound the prefix hit ratio too, in
either order of storing (replay.py). At small capacities that bound is loose: hits behind a miss, which Belady collects, are worth nothing
to an engine.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.protocol.errors import InvalidArgument

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Accesses:
    """Uses of blocks in the order of prompts and of blocks in them; all arrays have one element a use."""

    times_s: NDArray[np.float64]
    """Of the prompts, ascending: one that is earlier in the trace than the prompt before has that one's time."""
    blocks: Indices
    """Numbered from 0 without gaps, in no order that matters."""
    previous: Indices
    """Index of the same block's use before, -1 for its first."""
    next: Indices
    """Index of the same block's next use, -1 for its last."""

    def __len__(self) -> int:
        return self.blocks.size

    @property
    def unique(self) -> int:
        return int(np.count_nonzero(self.previous < 0))


def flatten(requests: Iterable[TraceRequest]) -> Accesses:
    """O(n log n) for n uses of blocks."""
    lengths: list[int] = []
    times_ms: list[float] = []
    ids: list[int] = []
    for request in requests:
        lengths.append(len(request.hash_ids))
        times_ms.append(request.timestamp_ms)
        ids += request.hash_ids
    times_s = np.repeat(np.maximum.accumulate(np.asarray(times_ms, dtype=np.float64)) / 1000, lengths)
    every: NDArray[np.uint64] = np.asarray(ids, dtype=np.uint64)
    blocks: Indices = np.unique(every, return_inverse=True)[1].astype(np.int64)
    # Stable: uses of one block stand together, in their order.
    order = np.argsort(blocks, kind="stable")
    is_same = blocks[order[1:]] == blocks[order[:-1]]
    previous = np.full(len(ids), -1, dtype=np.int64)
    following = previous.copy()
    previous[order[1:][is_same]] = order[:-1][is_same]
    following[order[:-1][is_same]] = order[1:][is_same]
    return Accesses(times_s, blocks, previous, following)


def reuse_distances(accesses: Accesses) -> NDArray[np.float64]:
    """For every use the number of other blocks used since the same block's last use; infinite for a first use.

    A use is a hit of LRU, one block at a time, exactly if its distance is below the capacity. O(n log^2 n) for n uses, in numpy.
    Source: Mattson, Gecsei, Slutz, Traiger, Evaluation techniques for storage hierarchies, IBM Systems Journal 1970.
    """
    distances = np.full(len(accesses), np.inf)
    again = np.flatnonzero(accesses.previous >= 0)
    previous = accesses.previous[again]
    # Between the two uses each further use of a block that was used there already is one that counts no new block. Its own last use is
    # then later than `previous`; and whatever was last used after `previous` stands after it.
    distances[again] = again - previous - 1 - _greater_before(previous)
    return distances


def reuse_gaps_s(accesses: Accesses) -> NDArray[np.float64]:
    """Seconds since the same block's last use, of all uses but first ones."""
    again = np.flatnonzero(accesses.previous >= 0)
    return accesses.times_s[again] - accesses.times_s[accesses.previous[again]]


def used_once_share(accesses: Accesses) -> float:
    """Share of the unique blocks that are used once. 0 without blocks."""
    once = np.count_nonzero((accesses.previous < 0) & (accesses.next < 0))
    return float(once) / accesses.unique if accesses.unique else 0.0


def _greater_before(values: Indices) -> Indices:
    """For each of these distinct values the number of greater ones before it.

    A merge sort's passes, from pairs of single values up: in each pass an element of a right half counts the greater ones of its left half.
    """
    count = values.size
    ranks = np.empty(count, dtype=np.int64)
    ranks[np.argsort(values)] = np.arange(count)
    greater = np.zeros(count, dtype=np.int64)
    places = np.arange(count)
    width = 1
    while width < count:
        pair = places // (2 * width)
        order = np.argsort(pair * count + ranks)
        is_left = (order // width) % 2 == 0
        lefts_up_to_here = np.cumsum(is_left)
        # Of its own pair: those of all earlier pairs are whole, and have `width` left places each.
        lefts_in_pair = np.minimum(width, count - pair[order] * 2 * width)
        lefts_below = lefts_up_to_here - pair[order] * width
        greater[order] += np.where(is_left, 0, lefts_in_pair - lefts_below)
        width *= 2
    return greater


def working_set(accesses: Accesses, *, window_s: float, at_s: NDArray[np.float64]) -> Indices:
    """Unique blocks used in (t - window_s, t], for each t of `at_s`. O((n + m) log n) for n uses and m times.

    Raises InvalidArgument for a window that is not above 0 seconds.
    """
    if not window_s > 0:
        raise InvalidArgument(f"a window of {window_s:g} seconds: it must be above 0")
    # A use counts from its time until the window has passed, or until the block's next use counts in its place.
    ends_s = accesses.times_s + window_s
    is_used_again = accesses.next >= 0
    ends_s[is_used_again] = np.minimum(ends_s[is_used_again], accesses.times_s[accesses.next[is_used_again]])
    begun = np.searchsorted(np.sort(accesses.times_s), at_s, side="right")
    ended = np.searchsorted(np.sort(ends_s), at_s, side="right")
    return np.asarray(begun - ended, dtype=np.int64)


def infinite_hits(accesses: Accesses) -> int:
    """Uses of blocks used before. Where equal ids are equal prefixes all of them are prefix hits."""
    return len(accesses) - accesses.unique


def belady_hits(accesses: Accesses, capacity_blocks: int) -> int:
    """The most hits that `capacity_blocks` blocks can give when a missing block need not be stored. O(n log n).

    A missing block is stored if it is used again sooner than the resident one used again last, which leaves for it.
    Source: Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 1966, with the newcomer among
    those that may leave.
    """
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
