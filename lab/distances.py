"""How far apart a block's uses are, in other blocks and in seconds. No policy is asked."""

import numpy as np
from numpy.typing import NDArray

from kvstore.lab.accesses import Accesses, Indices


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
