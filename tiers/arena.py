"""Backs slabs with ranges of one contiguous arena, for devices whose memory is taken in one piece. It owns no memory."""

from bisect import bisect_left


class ArenaRanges:
    """Which ranges [begin, end) of an arena of `capacity_bytes` are taken by which slab. A slabs.Backing.

    First fit by address, neighbours joined on release: slabs of one size pack without gaps, mixed ones may leave some that are too
    short for a whole slab. Acquire and release are O(ranges), once a slab.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._free: list[tuple[int, int]] = [(0, capacity_bytes)]
        self._taken: dict[int, tuple[int, int]] = {}

    def begin(self, slab: int) -> int:
        """Offset of the slab's first byte in the arena."""
        return self._taken[slab][0]

    def acquire(self, slab: int, slot_bytes: int, count: int, tenant: str) -> int:
        """See Backing: the first range that has room for all, else the longest."""
        wanted_bytes = count * slot_bytes
        fitting = (place for place in self._free if place[1] - place[0] >= wanted_bytes)
        longest = max(self._free, key=lambda place: place[1] - place[0], default=(0, 0))
        begin, end = next(fitting, longest)
        count = min(count, (end - begin) // slot_bytes)
        if count:
            self._free.remove((begin, end))
            taken_end = begin + count * slot_bytes
            self._taken[slab] = (begin, taken_end)
            if taken_end < end:
                self._insert(taken_end, end)
        return count

    def has_warm(self, slot_bytes: int, count: int, tenant: str) -> bool:
        """A device's memory always is."""
        return True

    def release(self, slab: int) -> None:
        self._insert(*self._taken.pop(slab))

    def check_integrity(self) -> None:
        """Assert that free and taken ranges cover the arena once, free ones joined. For tests."""
        cover = sorted([*self._free, *self._taken.values()])
        assert [end for _, end in cover] == [begin for begin, _ in cover[1:]] + [self._capacity_bytes]
        assert cover[0][0] == 0
        assert self._free == sorted(self._free)
        assert all(left[1] < right[0] for left, right in zip(self._free, self._free[1:], strict=False)), "neighbours are not joined"

    def _insert(self, begin: int, end: int) -> None:
        place = bisect_left(self._free, (begin, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place > 0 and self._free[place - 1][1] == begin:
            place -= 1
            begin = self._free.pop(place)[0]
        self._free.insert(place, (begin, end))
