"""What is asked of the directory: which keys can be read now, where, and how much of a prompt each node has. It changes nothing.

The hot path: a few C loops over columns (rows.py) a batch.
"""

import fnmatch
import re
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.master.directory.key_index import FEW
from kvstore.master.directory.locating import Indexes, locate
from kvstore.master.directory.prefixes import Part, Prefixes, prefixes
from kvstore.master.directory.rows import Rows
from kvstore.master.directory.tenants import Tenant, Tenants
from kvstore.protocol.master_messages import Locations


class Queries:
    """See the module. An unknown tenant has nothing, and a question makes none. Not thread-safe."""

    def __init__(self, rows: Rows, tenants: Tenants) -> None:
        self._rows, self._tenants = rows, tenants

    def exists(self, tenant: str, keys: Sequence[bytes]) -> bytes:
        """1 for each key that can be read now."""
        return self._of_sets(tenant, keys, self._rows.sets.live)

    def standing(self, tenant: str, keys: Sequence[bytes]) -> bytes:
        """Of each key NOBODY, HINTED or NAMED: see holders.py."""
        return self._of_sets(tenant, keys, self._rows.sets.standing)

    def _of_sets(self, tenant: str, keys: Sequence[bytes], column: bytearray) -> bytes:
        """Of each key what `column` says of its holders."""
        if len(keys) <= FEW:
            index, holders = self._tenants.asked(tenant).rows, self._rows.holders
            return bytes([column[holders[index.get(key)]] for key in keys])
        held = np.frombuffer(self._rows.holders, np.uint32)[self._find(tenant, keys)]
        return np.frombuffer(column, np.uint8)[held].tobytes()

    def match_prefix(self, tenant: str, keys: Sequence[bytes]) -> int:
        """How many keys can be read now, from the first on without a gap."""
        gap = self.exists(tenant, keys).find(0)
        return len(keys) if gap < 0 else gap

    def prefixes(self, tenant: str, keys: Sequence[bytes]) -> Prefixes:
        """How many of these keys, from the first on without a gap, can be read at each node."""
        return prefixes([self.part(tenant, keys, range(len(keys)))])

    def part(self, tenant: str, keys: Sequence[bytes], places: Sequence[int]) -> Part:
        """Of a prompt the blocks `places`, which have these keys."""
        return Part(self._rows, self._find(tenant, keys), places)

    def rows_of(self, tenant: str, keys: Sequence[bytes]) -> Indexes:
        """The rows of the keys, in their order; NO_ROW for those that are nowhere."""
        return self._find(tenant, keys)

    def lookup(self, tenant: str, keys: Sequence[bytes], *, avoid: int = 0) -> Locations:
        """Where the keys are, at nodes that live and are not `avoid` (0: none)."""
        return locate(self._rows, self._find(tenant, keys), avoid=avoid)

    def list_keys(self, tenant: str, namespace: str | None = None, *, slice_rows: int = 65_536) -> Iterator[list[tuple[bytes, int, str]]]:
        """(key, size, namespace) of the blocks that can be read, of one namespace or all (None), `slice_rows` rows at a time.

        The directory may change between slices: a block that is there all the time is listed once.
        """
        rows = self._rows
        for owner, part in self._slices(tenant, slice_rows):
            listed = [
                (rows.keys[row], rows.sizes[row], rows.namespaces[rows.namespace_indexes[row]])
                for row in part
                if rows.sets.live[rows.holders[row]] and rows.tenant_indexes[row] == owner.index
            ]
            yield [entry for entry in listed if namespace in (None, entry[2])]

    def held_keys(self, tenant: str, namespace: str | None, pattern: str, *, slice_rows: int) -> Iterator[list[bytes]]:
        """The keys of blocks that nodes hold, live or not, in one namespace or all (None), that match `pattern`, a shell's, as UTF-8:
        `slice_rows` rows at a time, as `list_keys`."""
        rows, matches = self._rows, re.compile(fnmatch.translate(pattern.encode().decode("latin-1")).encode("latin-1")).match
        for owner, part in self._slices(tenant, slice_rows):
            yield [
                key
                for row in part
                if rows.tenant_indexes[row] == owner.index
                and namespace in (None, rows.namespaces[rows.namespace_indexes[row]])
                and rows.pairs(row)
                and matches(key := rows.keys[row])
            ]

    def _slices(self, tenant: str, slice_rows: int) -> Iterator[tuple[Tenant, range]]:
        """Rows from the first to the last that there is by then, in parts; to its end if the tenant has nothing any more."""
        begin = 0
        while begin < len(self._rows) and (owner := self._tenants.get(tenant)) is not None:
            end = min(begin + slice_rows, len(self._rows))
            yield owner, range(begin, end)
            begin = end

    def _find(self, tenant: str, keys: Sequence[bytes]) -> Indexes:
        return self._tenants.asked(tenant).rows.find(keys)
