"""Expected reads: blocks that a hint says are read again at a given time, and the probability that such hints come true.

The state of an expectation is its length (MAGNITUDES, by factors of 2) and the part of it that has passed (PARTS). For
each state the log learns how often the read comes in it, from evicted blocks too. The worth of a block follows as in
reuse_hazard.py: hits per second at the best time to stop waiting. It rises as the time nears, as far as earlier
expectations came true. After twice its length an expectation ends.
"""

import heapq
import math
from collections.abc import Callable
from typing import Final, Generic

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.policies.interface import K
from kvstore.tiers.policies.prefix.reuse_hazard import BUCKETS, HALF_LIFE
from kvstore.tiers.policies.prefix.visits import CLASSES, Cohort

PART_EDGES: Final = (0.0, 0.25, 0.5, 0.75, 0.875, 0.95, 1.05, 1.25, 1.5, 2.0)
"""Edges of the parts, as fractions of the expected time."""
PARTS: Final = len(PART_EDGES) - 1
PRIOR_SHARES: Final = (0.02, 0.02, 0.03, 0.03, 0.04, 0.3, 0.1, 0.08, 0.08)
"""Assumed probability of a read in each part, without observations: half of all expectations come true."""
PRIOR: Final = 4.0
"""Weight of PRIOR_SHARES, and of the shares of all lengths together, in expectations."""
TRUE_PARTS: Final = slice(2, 7)
"""An expectation came true if the read came between half of the expected time and 1.25 times that."""
BELIEVED: Final = 0.25
"""Least share of expectations of about one length that came true. Below it blocks keep their ordinary worth, which knows
their class. Random times come true in 1 to 10 %.
"""
SHORTEST_S: Final = 1 / 8
"""Shorter expectations count as this long: ageing has this resolution."""
MAGNITUDES: Final = 18
"""Lengths from SHORTEST_S to 4.5 hours, by factors of 2; longer ones count as the last."""
SAME_LENGTHS: Final = 32
"""Expectations of one tick share a cohort if their lengths differ by less than a factor of 2 ** (1 / 32)."""
SAME_TICK: Final = 1 / 128
"""Length of such a tick, as a fraction of the expected time, but from SHORTEST_S to MAX_TICK_S."""
MAX_TICK_S: Final = 1.0
MAX_EXPECTED: Final = 16_384
"""Cohorts of expectations under way, about 600 bytes each; hints beyond that are ignored."""
FIRST_EXPECTED: Final = CLASSES + 1
"""Class of the cohorts of the shortest expectations."""

NEGLIGIBLE: Final = 1e-6
"""Part of an expectation below which it has no blocks left."""

_WIDTHS: Final = np.diff(PART_EDGES)
_LENGTHS_S: Final = SHORTEST_S * 2.0 ** (np.arange(MAGNITUDES) + 0.5)


class ExpectedRead(Cohort[K]):
    """Blocks expected to be read at one time. `bucket` is the part of that time that has passed."""

    __slots__ = ("after_s", "blocks", "is_over")

    def __init__(self, after_s: float, now_s: float) -> None:
        magnitude = min(int(math.log2(after_s / SHORTEST_S)), MAGNITUDES - 1)
        super().__init__(FIRST_EXPECTED + magnitude, now_s)
        self.after_s = after_s
        self.blocks = 0
        """Blocks that ever had this expectation; each is an equal share of one observation."""
        self.unread = 1.0
        self.is_over = False


class ExpectedReads(Generic[K]):
    """Expectations under way, and how earlier ones came true. Not thread-safe."""

    def __init__(self, on_older: Callable[[Cohort[K], int], None]) -> None:
        """`on_older` is called with a cohort and its next part before the cohort passes into it."""
        self._on_older = on_older
        self._seen = np.zeros((MAGNITUDES, PARTS))
        """Expectations that went through each part, or were read in it; and the latter."""
        self._read = np.zeros((MAGNITUDES, PARTS))
        self._is_believed = [True] * MAGNITUDES
        self._open: dict[int, ExpectedRead[K]] = {}
        """Newest cohort of each length."""
        self._passing: list[tuple[float, int, ExpectedRead[K]]] = []
        """Heap of cohorts by the time at which they pass into the next part."""
        self._made = 0

    def begin(self, after_s: float, now_s: float) -> ExpectedRead[K] | None:
        """Return the cohort for one more block that is expected after `after_s` seconds; None beyond MAX_EXPECTED."""
        after_s = max(after_s, SHORTEST_S)
        length = round(math.log2(after_s) * SAME_LENGTHS)
        found = self._open.get(length)
        tick_s = min(max(SHORTEST_S, SAME_TICK * after_s), MAX_TICK_S)
        if found is None or found.is_over or now_s - found.time_s >= tick_s:
            if len(self._passing) >= MAX_EXPECTED:
                return None
            found = self._open[length] = ExpectedRead(after_s, now_s)
            self._push(found)
        found.blocks += 1
        return found

    def end(self, expected: ExpectedRead[K], *, was_read: bool) -> None:
        """End one block's expectation: it was read, or has another."""
        share = min(1 / expected.blocks, expected.unread)
        expected.unread -= share
        if was_read and not expected.is_over:
            at = expected.klass - FIRST_EXPECTED, expected.bucket
            self._seen[at] += share
            self._read[at] += share

    def advance(self, now_s: float) -> list[ExpectedRead[K]]:
        """Pass expectations into the part of their time; each does so PARTS times at most. Returns those that have ended
        unread or are not believed.
        """
        unfiled = list[ExpectedRead[K]]()
        while self._passing and self._passing[0][0] <= now_s:
            _, _, expected = heapq.heappop(self._passing)
            magnitude = expected.klass - FIRST_EXPECTED
            part = expected.bucket
            while part < PARTS and now_s >= expected.time_s + PART_EDGES[part + 1] * expected.after_s:
                self._seen[magnitude, part] += expected.unread
                part += 1
            expected.is_over = part == PARTS or expected.unread < NEGLIGIBLE
            if expected.is_over or not self._is_believed[magnitude]:
                unfiled.append(expected)
            if not expected.is_over:
                self._on_older(expected, part)
                expected.bucket = part
                self._push(expected)
        return unfiled

    def is_believed(self, expected: ExpectedRead[K]) -> bool:
        """Return True if the worth of the blocks follows from the expectation."""
        return self._is_believed[expected.klass - FIRST_EXPECTED]

    def age(self, observations: int) -> None:
        """Discount what was seen by the number of visits since the last call."""
        factor = 0.5 ** (observations / HALF_LIFE)
        self._seen *= factor
        self._read *= factor

    def worth(self) -> NDArray[np.float64]:
        """Return the worth of a block in hits per second. Shape (MAGNITUDES, BUCKETS); only PARTS columns are in use."""
        share = self._read_share()
        reaching = np.cumprod(np.hstack([np.ones((MAGNITUDES, 1)), 1 - share[:, :-1]]), axis=1)
        self._is_believed = ((reaching * share)[:, TRUE_PARTS].sum(axis=1) >= BELIEVED).tolist()
        worth = np.zeros((MAGNITUDES, BUCKETS))
        for part in range(PARTS):
            survival = np.cumprod(np.hstack([np.ones((MAGNITUDES, 1)), 1 - share[:, part:-1]]), axis=1)
            hits = np.cumsum(survival * share[:, part:], axis=1)
            held = np.cumsum(survival * _WIDTHS[part:] * (1 - share[:, part:] / 2), axis=1)
            worth[:, part] = (hits / held).max(axis=1) / _LENGTHS_S
        return worth

    def check_integrity(self) -> None:
        """Assert that each expectation under way waits for its next part. For tests."""
        assert len(self._passing) <= MAX_EXPECTED
        assert all(not expected.is_over and expected.bucket < PARTS for _, _, expected in self._passing)

    def _read_share(self) -> NDArray[np.float64]:
        """Return the probability that a block that enters a part is read in it. Shape (MAGNITUDES, PARTS)."""
        common = (self._read.sum(axis=0) + PRIOR * np.array(PRIOR_SHARES)) / (self._seen.sum(axis=0) + PRIOR)
        return np.asarray((self._read + PRIOR * common) / (self._seen + PRIOR), np.float64)

    def _push(self, expected: ExpectedRead[K]) -> None:
        self._made += 1
        next_s = expected.time_s + PART_EDGES[expected.bucket + 1] * expected.after_s
        heapq.heappush(self._passing, (next_s, self._made, expected))
