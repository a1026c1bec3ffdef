"""What engines have in memory of their own: which blocks of a prompt an instance need not even fetch. Sans-I/O and pure bookkeeping.

A change names the version that it is of. One that does not continue what is here is not taken: the answer to a report tells the instance
which version that is, and it begins again with an empty cache. So a lost report, a master that was started again and an instance that was
all mend themselves with the next report.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import MAX_KEY_BYTES
from kvstore.scheduler.prefix_index import PrefixIndex

MAX_CHANGED_BLOCKS: Final = 65_536
"""In one report, added and removed."""


@dataclass(slots=True)
class _Cache:
    """Of one instance: its number in its tenant's index, the version that is there, and what it has: it is forgotten by that alone."""

    tenant: str
    number: int
    version: int
    keys: set[bytes] = field(default_factory=set)


class EngineCaches:
    """Of all instances, by name. Not thread-safe. Memory: an entry a block of a tenant, and one for each engine that has it."""

    def __init__(self, *, max_blocks: int) -> None:
        """`max_blocks`: of one instance. What it has beyond is not known of, until it has less."""
        self._max_blocks = max_blocks
        self._caches: dict[str, _Cache] = {}
        self._indexes: dict[str, PrefixIndex[bytes]] = {}
        self._numbers: dict[str, list[bool]] = {}
        """Of each tenant, which numbers are in use."""

    def version(self, name: str) -> int:
        """0: nothing of it is here."""
        cache = self._caches.get(name)
        return 0 if cache is None else cache.version

    def blocks(self, name: str) -> int:
        """How many of its blocks are known of."""
        cache = self._caches.get(name)
        return 0 if cache is None else len(cache.keys)

    def apply(self, name: str, change: pb.EngineCache) -> None:
        """Take a change, if it continues what is here. Raises InvalidArgument for one that cannot be, as `check_change` does."""
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
        """Nothing of it is here any more. One that is not known is ignored. O(its blocks)."""
        cache = self._caches.pop(name, None)
        if cache is None:
            return
        numbers, index = self._numbers[cache.tenant], self._indexes[cache.tenant]
        index.remove(cache.number, cache.keys)
        numbers[cache.number] = False
        if not any(numbers):
            del self._numbers[cache.tenant], self._indexes[cache.tenant]

    def match(self, tenant: str, keys: Sequence[bytes], names: Sequence[str]) -> list[int]:
        """How many leading blocks each of these has."""
        index = self._indexes.get(tenant)
        if index is None:
            return [0] * len(names)
        runs = index.match(keys, len(self._numbers[tenant]))
        caches = [self._caches.get(name) for name in names]
        return [runs[cache.number] if cache is not None and cache.tenant == tenant else 0 for cache in caches]

    def _take_number(self, tenant: str) -> int:
        """The lowest that is free: numbers stay dense."""
        self._indexes.setdefault(tenant, PrefixIndex())
        numbers = self._numbers.setdefault(tenant, [])
        if False not in numbers:
            numbers.append(False)
        number = numbers.index(False)
        numbers[number] = True
        return number


def check_change(name: str, change: pb.EngineCache) -> None:
    """Raises InvalidArgument: no length of keys divides what came, or there are too many, or it is of no version."""
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
