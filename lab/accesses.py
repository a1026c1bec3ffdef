"""A trace's block accesses as arrays, and statistics of them: reuse distances, working set, upper bounds of any policy's hits.

The bounds are an infinite cache, and Belady's algorithm with bypass. They count hits at any position of a prompt, so they also bound the
prefix hit ratio. At small capacities the bound is loose: Belady also collects hits after a miss, which are useless to an engine.
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
    """Block accesses in the order of prompts and of their blocks; each array has one element per access."""

    times_s: NDArray[np.float64]
    """Time of the prompt, ascending: a prompt with an earlier timestamp than its predecessor gets the predecessor's."""
    blocks: Indices
    """Block numbers, from 0 without gaps."""
    previous: Indices
    """Index of the block's previous access, or -1."""
    next: Indices
    """Index of the block's next access, or -1."""

    def __len__(self) -> int:
        return self.blocks.size

    @property
    def unique(self) -> int:
        return int(np.count_nonzero(self.previous < 0))


def flatten(requests: Iterable[TraceRequest]) -> Accesses:
    """Convert requests to arrays. O(n log n) for n accesses."""
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
    # Stable sort: accesses of one block are adjacent and in order.
    order = np.argsort(blocks, kind="stable")
    is_same = blocks[order[1:]] == blocks[order[:-1]]
    previous = np.full(len(ids), -1, dtype=np.int64)
    following = previous.copy()
    previous[order[1:][is_same]] = order[:-1][is_same]
    following[order[:-1][is_same]] = order[1:][is_same]
    return Accesses(times_s, blocks, previous, following)


def reuse_distances(accesses: Accesses) -> NDArray[np.float64]:
    """Return for each access the number of other blocks accessed since the same block's last access; infinite for a first access.

    An access hits in LRU if and only if its distance is below the capacity. O(n log^2 n) for n accesses, in numpy.
    Source: Mattson, Gecsei, Slutz, Traiger, Evaluation techniques for storage hierarchies, IBM Systems Journal 1970.
    """
    distances = np.full(len(accesses), np.inf)
    again = np.flatnonzero(accesses.previous >= 0)
    previous = accesses.previous[again]
    # Among the accesses between the two, those whose own previous access is also later than `previous` repeat a block and are not counted.
    distances[again] = again - previous - 1 - _greater_before(previous)
    return distances


def reuse_gaps_s(accesses: Accesses) -> NDArray[np.float64]:
    """Return the seconds since the same block's last access, for all but first accesses."""
    again = np.flatnonzero(accesses.previous >= 0)
    return accesses.times_s[again] - accesses.times_s[accesses.previous[again]]


def used_once_share(accesses: Accesses) -> float:
    """Return the share of unique blocks that are accessed once; 0 without blocks."""
    once = np.count_nonzero((accesses.previous < 0) & (accesses.next < 0))
    return float(once) / accesses.unique if accesses.unique else 0.0


def _greater_before(values: Indices) -> Indices:
    """Return for each of these distinct values the number of greater values before it.

    Bottom-up merge sort: in each pass an element of a right half counts the greater elements of its left half.
    """
    count = values.size
    ranks = np.empty(count, dtype=np.int64)
    ranks[np.argsort(values)] = np.arange(count)
    greater = np.zeros(count, dtype=np.int64)
    indices = np.arange(count)
    width = 1
    while width < count:
        pair = indices // (2 * width)
        order = np.argsort(pair * count + ranks)
        is_left = (order // width) % 2 == 0
        lefts_up_to_here = np.cumsum(is_left)
        # Left elements of its own pair: all earlier pairs are complete and have `width` each.
        lefts_in_pair = np.minimum(width, count - pair[order] * 2 * width)
        lefts_below = lefts_up_to_here - pair[order] * width
        greater[order] += np.where(is_left, 0, lefts_in_pair - lefts_below)
        width *= 2
    return greater


def working_set(accesses: Accesses, *, window_s: float, at_s: NDArray[np.float64]) -> Indices:
    """Return the number of unique blocks accessed in (t - window_s, t], for each t of `at_s`. O((n + m) log n) for n accesses, m times.

    Raises InvalidArgument unless the window is positive.
    """
    if not window_s > 0:
        raise InvalidArgument(f"the window is {window_s:g} seconds: it must be above 0")
    # An access counts until the window has passed, or until the block's next access replaces it.
    ends_s = accesses.times_s + window_s
    is_used_again = accesses.next >= 0
    ends_s[is_used_again] = np.minimum(ends_s[is_used_again], accesses.times_s[accesses.next[is_used_again]])
    begun = np.searchsorted(np.sort(accesses.times_s), at_s, side="right")
    ended = np.searchsorted(np.sort(ends_s), at_s, side="right")
    return np.asarray(begun - ended, dtype=np.int64)


def infinite_hits(accesses: Accesses) -> int:
    """Return the hits of an infinite cache. If equal ids are equal prefixes, all of them are prefix hits."""
    return len(accesses) - accesses.unique


def belady_hits(accesses: Accesses, capacity_blocks: int) -> int:
    """Return the most hits that a cache of `capacity_blocks` blocks can have, with bypass. O(n log n).

    A missing block replaces the resident block with the latest next access, unless its own next access is later still.
    Source: Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 1966, extended by bypass.
    """
    never = len(accesses)
    next_use = np.where(accesses.next < 0, never, accesses.next).tolist()
    blocks = accesses.blocks.tolist()
    resident: set[int] = set()
    latest: list[tuple[int, int]] = []
    """Heap of (-next access, block). Stale entries stay: they sort after those of all resident blocks."""
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
    """Evict the block with the latest next access, if that is later than `soon`."""
    if -latest[0][0] < soon:
        return False
    resident.remove(heapq.heappop(latest)[1])
    return True
