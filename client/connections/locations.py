"""Locations of blocks: the result type of `locate`, and the location cache that saves most reads a request to the
master."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvstore.protocol.message import TIER_BITS


@dataclass(frozen=True, slots=True)
class Location:
    """One replica of a block, as known to the master."""

    node: str
    """Name of the node; "" if the master does not know it yet, as after a failover."""
    node_id: int
    tiers: tuple[str, ...]
    """Tiers that hold it: `hbm`, `dram`, `nvme`."""
    size_bytes: int
    checksum: int
    """xxh3_64 of the value that was put; a node with `nvme_codec` may return other bytes."""
    generation: int
    """Rises with each put of the key; a read that names it gets this version or a miss."""


class CachedLocation(NamedTuple):
    """Last known location of a block. May be stale; the node checks the generation."""

    node_id: int
    generation: int
    size_bytes: int
    asked_ns: int = 0
    """Time of the master's reply, for a block on another host that may get a better replica; else 0."""
    replicas: int = 1
    """Number of nodes that had the block, without one that was to be avoided."""


class LocationCache:
    """LRU cache of block locations: `capacity` at most, and at least 15/16 of it once full. Thread-safe; a batch takes
    the lock once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hints: dict[bytes, CachedLocation] = {}
        """Least recently used first. An OrderedDict takes six times as long to insert a batch."""
        self._lock = threading.Lock()
        self.has_dropped = False
        """Entries were evicted: a key without an entry may still have been put by this client."""

    def find(self, keys: Sequence[bytes]) -> list[CachedLocation | None]:
        """The location, or None, of each key."""
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
        """`learn` for one key."""
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
        """`learn` for keys with one location."""
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
        """Move these keys to the end, in a single C call: an exception of a signal handler in between would lose an
        entry, and with it the fact that this client has an uncommitted put of the key."""
        self._hints.update(zip(keys, map(self._hints.pop, keys), strict=True))

    def _drop_first(self) -> None:
        """Evict down to 15/16 of capacity: a dict finds its front by skipping all entries deleted there, so evictions
        are batched."""
        self.has_dropped = True
        for key in list(islice(self._hints, len(self._hints) - self._capacity + (self._capacity >> 4))):
            del self._hints[key]

    def __len__(self) -> int:
        return len(self._hints)


def tier_names(mask: int) -> tuple[str, ...]:
    """Names of the tiers in a tier mask, fastest first."""
    return tuple(name for name, bit in TIER_BITS.items() if mask & bit)
