"""Index of the engines' own caches: which blocks of a prompt an instance has in its memory. Sans-I/O.

A change names the version that it starts from. One that does not continue the known version is dropped: the response
to a report has the known version, and the instance starts over with an empty cache. So the state recovers from a
lost report or a restart with the next report."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import MAX_KEY_BYTES
from kvstore.scheduler.prefix_index import PrefixIndex

MAX_CHANGED_BLOCKS: Final = 65_536
"""Added and removed blocks of one report."""


@dataclass(slots=True)
class _Cache:
    """One instance's cache: its number in its tenant's index, its version, and its keys, by which it is removed."""

    tenant: str
    number: int
    version: int
    keys: set[bytes] = field(default_factory=set)


class EngineCaches:
    """Caches of all instances, by name. Not thread-safe. Memory: an entry a block of a tenant, and one for each
    engine that has it."""

    def __init__(self, *, max_blocks: int) -> None:
        """`max_blocks` limits the known blocks of one instance; further ones are ignored."""
        self._max_blocks = max_blocks
        self._caches: dict[str, _Cache] = {}
        self._indexes: dict[str, PrefixIndex[bytes]] = {}
        self._numbers: dict[str, list[bool]] = {}
        """By tenant: which numbers are in use."""

    def version(self, name: str) -> int:
        """Return the known version, 0 for none."""
        cache = self._caches.get(name)
        return 0 if cache is None else cache.version

    def blocks(self, name: str) -> int:
        """Return the number of known blocks."""
        cache = self._caches.get(name)
        return 0 if cache is None else len(cache.keys)

    def apply(self, name: str, change: pb.EngineCache) -> None:
        """Apply a change, if it continues the known version. Raises InvalidArgument, as `check_change`."""
        check_change(name, change)
        if change.base_version == 0:
            self.leave(name)
            self._caches[name] = _Cache(change.tenant, self._take_number(change.tenant), 0)
        cache = self._caches.get(name)
        if cache is None or cache.version != change.base_version or cache.tenant != change.tenant:
            return
        index = self._indexes[cache.tenant]
        removed = _cut(change.removed, change.key_bytes)
        index.remove(cache.number, removed)
        cache.keys.difference_update(removed)
        added = _cut(change.added, change.key_bytes)[: self._max_blocks - len(cache.keys)]
        index.add(cache.number, added)
        cache.keys.update(added)
        cache.version = change.version

    def leave(self, name: str) -> None:
        """Drop the instance's cache. An unknown one is ignored. O(its blocks)."""
        cache = self._caches.pop(name, None)
        if cache is None:
            return
        numbers, index = self._numbers[cache.tenant], self._indexes[cache.tenant]
        index.remove(cache.number, cache.keys)
        numbers[cache.number] = False
        if not any(numbers):
            del self._numbers[cache.tenant], self._indexes[cache.tenant]

    def match(self, tenant: str, keys: Sequence[bytes], names: Sequence[str]) -> list[int]:
        """Return the number of leading blocks that each instance has."""
        index = self._indexes.get(tenant)
        if index is None:
            return [0] * len(names)
        runs = index.match(keys, len(self._numbers[tenant]))
        caches = [self._caches.get(name) for name in names]
        return [runs[cache.number] if cache is not None and cache.tenant == tenant else 0 for cache in caches]

    def _take_number(self, tenant: str) -> int:
        """Return the lowest free number: numbers stay dense."""
        self._indexes.setdefault(tenant, PrefixIndex())
        numbers = self._numbers.setdefault(tenant, [])
        if False not in numbers:
            numbers.append(False)
        number = numbers.index(False)
        numbers[number] = True
        return number


def check_change(name: str, change: pb.EngineCache) -> None:
    """Raise InvalidArgument if key lengths do not fit, there are too many keys, or the version is 0."""
    size = change.key_bytes
    if not 1 <= size <= MAX_KEY_BYTES or len(change.added) % size or len(change.removed) % size:
        raise InvalidArgument(
            f"instance {name!r} reports {len(change.added)} and {len(change.removed)} bytes of keys of {size} bytes each:"
            f" send whole keys of 1 to {MAX_KEY_BYTES} bytes, all of one length"
        )
    if (count := (len(change.added) + len(change.removed)) // size) > MAX_CHANGED_BLOCKS:
        raise InvalidArgument(f"instance {name!r} reports {count} changed blocks at once: send at most {MAX_CHANGED_BLOCKS} a report")
    if not change.version:
        raise InvalidArgument(f"instance {name!r} reports version 0 of its cache: versions count from 1")


def _cut(keys: bytes, size: int) -> list[bytes]:
    return [keys[begin : begin + size] for begin in range(0, len(keys), size)]
