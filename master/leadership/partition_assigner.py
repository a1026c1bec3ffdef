"""How masters share the partitions of the key space out among themselves. Sans-I/O: who lives, and the time, are passed in.

All compute the same from who lives: each partition has an order of masters by rendezvous hashing, and goes to the first in it that has not
its even share yet. So few partitions move when a master comes or goes. Nobody takes a partition from another: whoever owns one that is
another's share gives it up, one at a time, once the masters that live have been the same for a while.

Source: D. G. Thaler, C. V. Ravishankar, Using name-based mappings to increase hit rates, IEEE/ACM Transactions on Networking 6 (1998).
"""

from collections.abc import Collection, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import xxhash

MAX_PAUSE_NS: Final = 300_000_000_000
"""Before a partition is given up again that came back, whoever it was given up for: doubles from `settle_s` to this."""
MAX_TURNS: Final = 5
"""After so many every master left stands for election."""


@dataclass(frozen=True, slots=True)
class RebalanceTiming:
    """How long who lives, and what a master owns, must have been the same before anything moves for it, what is between two partitions that
    a master gives up, and how long each master in a partition's order leaves it to the one before when nobody owns it."""

    settle_s: float = 3.0
    pause_s: float = 1.0
    turn_s: float = 0.2


@lru_cache(maxsize=64)
def shares(living: frozenset[str], count: int) -> tuple[str, ...]:
    """For each of `count` partitions whose share it is; of no masters nothing."""
    if not living:
        return ()
    least, extra = divmod(count, len(living))
    held = dict.fromkeys(living, 0)
    found = []
    for partition in range(count):
        for master in order(living, partition):
            if held[master] < least or (held[master] == least and extra):
                extra -= held[master] == least
                held[master] += 1
                found.append(master)
                break
    return tuple(found)


def order(living: Collection[str], partition: int) -> list[str]:
    """The masters in the partition's order."""
    return sorted(living, key=lambda master: (xxhash.xxh3_64_intdigest(f"{partition} {master}".encode()), master))


class PartitionAssigner:
    """One master's part of it. `wait_s` may be called from any thread; the rest is for one."""

    def __init__(self, me: str, count: int, patience: RebalanceTiming) -> None:
        self._me = me
        self._count = count
        self._settle_ns, self._pause_ns = int(patience.settle_s * 1e9), int(patience.pause_s * 1e9)
        self._turn_s = patience.turn_s
        self._living: frozenset[str] = frozenset()
        self._since_ns = 0
        """Since when these live."""
        self._next_ns = 0
        self._taken: dict[int, int] = {}
        """Since when it owns what it owns."""
        self._given: dict[int, tuple[int, int]] = {}
        """By partition that was given up: until when it is not again, and the pause that this is."""

    def wait_s(self, living: frozenset[str], partition: int) -> float:
        """How long to leave a partition that nobody owns to others."""
        found = shares(living, self._count)
        if not found or self._me not in living or found[partition] == self._me:
            return 0.0
        turn = order(living - {found[partition]}, partition).index(self._me) + 1
        return min(turn, MAX_TURNS) * self._turn_s

    def give_up(self, living: frozenset[str], owned: Set[int], now_ns: int) -> int | None:
        """Which of the partitions that this master owns it is to give up now, for the one whose share it is."""
        if living != self._living:
            self._living, self._since_ns = living, now_ns
        self._taken = {partition: self._taken.get(partition, now_ns) for partition in owned}
        if self._me not in living or now_ns < max(self._since_ns + self._settle_ns, self._next_ns):
            return None
        found = shares(living, self._count)
        for partition in sorted(owned):
            until_ns, pause_ns = self._given.get(partition, (0, self._settle_ns // 2))
            is_settled = now_ns >= self._taken[partition] + self._settle_ns  # else it may be of one whose end is not known yet
            if found[partition] != self._me and is_settled and now_ns >= until_ns:
                pause_ns = min(2 * pause_ns, MAX_PAUSE_NS)
                self._given[partition] = now_ns + pause_ns, pause_ns
                self._next_ns = now_ns + self._pause_ns
                return partition
        for partition in [one for one in self._given if found[one] == self._me]:
            del self._given[partition]
        return None
