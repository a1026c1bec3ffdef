"""Where blocks are: what `locate` tells, and the hints that save most reads their question to the master."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvstore.protocol.message import TIER_BITS


@dataclass(frozen=True, slots=True)
class Location:
    """One replica of a block, as the master knew it when asked."""

    node: str
    """Its name; "" while the master does not know the node, as when it has just taken over."""
    node_id: int
    tiers: tuple[str, ...]
    """Names of the node's tiers that hold it: `hbm`, `dram`, `nvme`."""
    size_bytes: int
    checksum: int
    """xxh3_64 of the value as it was put; what a node with `nvme_codec` gives may have another."""
    generation: int
    """Rises when a key is written anew: a read that names it gets this version or nothing."""


class CachedLocation(NamedTuple):
    """Where a block was. May be stale at any time; the node checks the generation."""

    node_id: int
    generation: int
    size_bytes: int
    asked_ns: int = 0
    """When the master said so, of a block on another host where a copy may come to be at a better place; else 0."""
    replicas: int = 1
    """How many nodes had the block, but for one that was to be avoided."""


class LocationCache:
    """The last blocks whose place was learned or used: `capacity` at most, once there were more no less than 15/16 of that. Thread-safe;
    each call takes the lock once a batch."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hints: dict[bytes, CachedLocation] = {}
        """The longest unused first. An OrderedDict takes in a batch six times as slowly."""
        self._lock = threading.Lock()
        self.has_dropped = False
        """Some did not fit: what has no hint may have been put by this client all the same."""

    def find(self, keys: Sequence[bytes]) -> list[CachedLocation | None]:
        """A hint, or None, for each key."""
        with self._lock:
            found = list(map(self._hints.get, keys))
            self._use([key for key, hint in zip(keys, found, strict=True) if hint is not None])
        return found

    def find_one(self, key: bytes) -> CachedLocation | None:
        with self._lock:
            hint = self._hints.get(key)
            if hint is not None:
                self._use((key,))
            return hint

    def learn_one(self, key: bytes, hint: CachedLocation) -> None:
        """As `learn`, of one key."""
        with self._lock:
            known = self._hints
            is_known = key in known
            known[key] = hint
            if is_known:
                self._use((key,))
            if len(known) > self._capacity:
                self._drop_first()

    def learn(self, hints: Iterable[tuple[bytes, CachedLocation]]) -> None:
        with self._lock:
            known = self._hints
            for key, hint in hints:
                is_known = key in known
                known[key] = hint
                if is_known:
                    self._use((key,))
            if len(known) > self._capacity:
                self._drop_first()

    def learn_all(self, keys: Sequence[bytes], hint: CachedLocation) -> None:
        """As `learn`, of keys that have the same hint."""
        with self._lock:
            known = self._hints
            is_any_known = not known.keys().isdisjoint(keys)
            known.update(dict.fromkeys(keys, hint))
            if is_any_known:
                self._use(keys)
            if len(known) > self._capacity:
                self._drop_first()

    def forget(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._hints.pop(key, None)

    def _use(self, keys: Sequence[bytes]) -> None:
        """These, which have hints, leave last. In one call of C: what a signal handler raised between taking one out and putting it back
        would lose it, and with it that this client put the block early."""
        self._hints.update(zip(keys, map(self._hints.pop, keys), strict=True))

    def _drop_first(self) -> None:
        """There are too many, and some more go: what a dictionary has at its front is found by way of all that went from there."""
        self.has_dropped = True
        for key in list(islice(self._hints, len(self._hints) - self._capacity + (self._capacity >> 4))):
            del self._hints[key]

    def __len__(self) -> int:
        return len(self._hints)


def tier_names(mask: int) -> tuple[str, ...]:
    """The tiers of a tier mask, fastest first."""
    return tuple(name for name, bit in TIER_BITS.items() if mask & bit)
