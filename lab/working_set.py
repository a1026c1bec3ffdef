"""How many different blocks were used within the last so many seconds, over the time of a trace.

Source: Denning, The working set model for program behavior, CACM 1968.
"""

import numpy as np
from numpy.typing import NDArray

from kvstore.lab.accesses import Accesses, Indices
from kvstore.protocol.errors import InvalidArgument


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
