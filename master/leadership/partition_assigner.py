"""Assignment of partitions to masters. Sans-I/O: the live masters and the time are passed in.

All masters compute the same assignment from the live ones. Each partition has an order of masters by rendezvous
hashing, and is assigned to the first one that has less than its even share. So few partitions move when a master joins
or dies. No master takes a partition from another: an owner gives up partitions that are others' share, one at a time,
once the set of live masters is stable.

Source: D. G. Thaler, C. V. Ravishankar, Using name-based mappings to increase hit rates, IEEE/ACM Transactions on
Networking 6 (1998)."""

from collections.abc import Collection, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import xxhash

MAX_PAUSE_NS: Final = 300_000_000_000
"""Maximum delay before a partition that returned to this master is given up again; it doubles from `settle_s`."""
MAX_STEPS: Final = 5
"""Steps of `step_s` after which every remaining master campaigns."""


@dataclass(frozen=True, slots=True)
class RebalanceTiming:
    """Seconds: `settle_s` for which live masters and owned partitions must be stable before one moves; `pause_s`
    between two that a master gives up; `step_s` by which each master in a partition's order waits for the one
    before."""

    settle_s: float = 3.0
    pause_s: float = 1.0
    step_s: float = 0.2


@lru_cache(maxsize=64)
def shares(live_masters: frozenset[str], count: int) -> tuple[str, ...]:
    """Return the assigned master of each partition; empty without masters."""
    if not live_masters:
        return ()
    least, extra = divmod(count, len(live_masters))
    held = dict.fromkeys(live_masters, 0)
    found = []
    for partition in range(count):
        for master in order(live_masters, partition):
            if held[master] < least or (held[master] == least and extra):
                extra -= held[master] == least
                held[master] += 1
                found.append(master)
                break
    return tuple(found)


def order(live_masters: Collection[str], partition: int) -> list[str]:
    """Return the masters in the partition's order."""
    return sorted(live_masters, key=lambda master: (xxhash.xxh3_64_intdigest(f"{partition} {master}".encode()), master))


class PartitionAssigner:
    """One master's decisions about partitions. `wait_s` is thread-safe; the rest is for one thread."""

    def __init__(self, me: str, count: int, patience: RebalanceTiming) -> None:
        self._me = me
        self._count = count
        self._settle_ns, self._pause_ns = int(patience.settle_s * 1e9), int(patience.pause_s * 1e9)
        self._step_s = patience.step_s
        self._live_masters: frozenset[str] = frozenset()
        self._since_ns = 0
        """Last change of the live masters."""
        self._next_ns = 0
        self._taken: dict[int, int] = {}
        """Since when each partition is owned."""
        self._given: dict[int, tuple[int, int]] = {}
        """By given up partition: earliest time to give it up again, and the current delay."""

    def wait_s(self, live_masters: frozenset[str], partition: int) -> float:
        """Return how long to leave a partition without an owner to other masters."""
        found = shares(live_masters, self._count)
        if not found or self._me not in live_masters or found[partition] == self._me:
            return 0.0
        turn = order(live_masters - {found[partition]}, partition).index(self._me) + 1
        return min(turn, MAX_STEPS) * self._step_s

    def give_up(self, live_masters: frozenset[str], owned: Set[int], now_ns: int) -> int | None:
        """Return an owned partition to give up now, since it is another master's share; or None."""
        if live_masters != self._live_masters:
            self._live_masters, self._since_ns = live_masters, now_ns
        self._taken = {partition: self._taken.get(partition, now_ns) for partition in owned}
        if self._me not in live_masters or now_ns < max(self._since_ns + self._settle_ns, self._next_ns):
            return None
        found = shares(live_masters, self._count)
        for partition in sorted(owned):
            until_ns, pause_ns = self._given.get(partition, (0, self._settle_ns // 2))
            is_settled = now_ns >= self._taken[partition] + self._settle_ns  # else its assigned master may be dead and not yet expired
            if found[partition] != self._me and is_settled and now_ns >= until_ns:
                pause_ns = min(2 * pause_ns, MAX_PAUSE_NS)
                self._given[partition] = now_ns + pause_ns, pause_ns
                self._next_ns = now_ns + self._pause_ns
                return partition
        for partition in [one for one in self._given if found[one] == self._me]:
            del self._given[partition]
        return None
