"""The times between tokens of a whole simulation, with how often each occurred. Plain statistics; no time passes here."""

from collections.abc import Sequence
from itertools import accumulate


class Gaps:
    """Gaps in seconds, weighted by their number: a stretch of decode steps enters as its mean."""

    def __init__(self) -> None:
        self._found: dict[float, int] = {}

    def add(self, gap_s: float, count: int) -> None:
        """`count` tokens (0 is none) came `gap_s` after the one before."""
        if count:
            self._found[gap_s] = self._found.get(gap_s, 0) + count

    @property
    def count(self) -> int:
        return sum(self._found.values())

    @property
    def mean_s(self) -> float:
        """0 where there were none."""
        return sum(gap_s * count for gap_s, count in self._found.items()) / (self.count or 1)

    def percentiles_s(self, shares: Sequence[float]) -> list[float]:
        """For each of `shares`, ascending, the smallest gap that at least so many are not above; 0 where there were none."""
        ordered = sorted(self._found.items())
        total, found, seen, position = self.count, [], 0, 0
        for share in shares:
            while position < len(ordered) and (seen < share * total or not seen):
                seen += ordered[position][1]
                position += 1
            found.append(ordered[position - 1][0] if position else 0.0)
        return found

    def points(self) -> Sequence[tuple[float, float]]:
        """(gap in seconds, share of all gaps not above it), ascending: the points of a distribution curve."""
        ordered = sorted(self._found.items())
        total = self.count
        return [(gap_s, seen / total) for (gap_s, _), seen in zip(ordered, accumulate(count for _, count in ordered), strict=True)]
