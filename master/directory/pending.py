"""A tenant's commits that wait for the catalog: versions that nodes have and that nobody sees yet, by key.

What came together, of keys of which nothing was known, is kept together: the columns of its message, no object a block. Such a block gets
one when something else happens to its key before the catalog has answered.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.master.catalogs.interface import BlockPuts
from kvstore.master.directory.records import Version


class Pending(NamedTuple):
    """A version that a node has and the catalog does not yet: nobody sees it. `ticket` is the number of the plan it waits in."""

    ticket: int
    node_id: int
    version: Version
    tiers: int


@dataclass(slots=True, eq=False)
class PendingBatch:
    """Versions of one plan. `tiers`: a mask each, in the order of the columns."""

    ticket: int
    node_id: int
    puts: BlockPuts
    tiers: bytes
    _places: dict[bytes, int] = field(default_factory=dict)

    def of(self, key: bytes) -> Pending:
        """The one of a key that it has."""
        if not self._places:
            self._places.update(zip(self.puts.keys, range(len(self.puts.keys)), strict=True))
        at, puts = self._places[key], self.puts
        version = Version(puts.sizes[at], puts.checksums[at], puts.generations[at], puts.namespaces[at], puts.parents[at])
        return Pending(self.ticket, self.node_id, version, self.tiers[at])


class PendingCommits:
    """By key, in the order in which they came. Not thread-safe."""

    def __init__(self) -> None:
        self._of_key: dict[bytes, tuple[Pending, ...] | PendingBatch] = {}

    def __len__(self) -> int:
        """Keys that have any."""
        return len(self._of_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._of_key

    def __getitem__(self, key: bytes) -> tuple[Pending, ...]:
        """Those of a key; none: an empty tuple."""
        found = self._of_key.get(key, ())
        return (found.of(key),) if isinstance(found, PendingBatch) else found

    def __setitem__(self, key: bytes, waiting: tuple[Pending, ...]) -> None:
        """These are all of the key from now on."""
        if waiting:
            self._of_key[key] = waiting
        else:
            self._of_key.pop(key, None)

    def has_any(self, keys: Iterable[bytes]) -> bool:
        """Whether one of the keys has any."""
        return bool(self._of_key) and not self._of_key.keys().isdisjoint(keys)

    def add_all(self, batch: PendingBatch) -> None:
        """Of different keys that have none."""
        self._of_key.update(dict.fromkeys(batch.puts.keys, batch))

    def take_all(self, batch: PendingBatch) -> bool:
        """Take out all of a batch, if they are as they came; else False, with nothing done."""
        keys = batch.puts.keys
        if list(map(self._of_key.get, keys)).count(batch) < len(keys):
            return False
        for key in keys:
            del self._of_key[key]
        return True

    def items(self) -> Iterator[tuple[bytes, tuple[Pending, ...]]]:
        """Each key and what it has; nothing must change meanwhile."""
        for key in self._of_key:
            yield key, self[key]
