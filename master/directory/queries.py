"""What is asked of the directory: which keys can be read now, where, and how much of a prompt each node has. It changes nothing.

The hot path: a few C loops over columns (rows.py) a batch.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np

from kvstore.master.directory.locating import Indexes, locate
from kvstore.master.directory.prefixes import Prefixes, prefixes
from kvstore.master.directory.rows import NO_ROW, Rows
from kvstore.master.directory.tenants import Tenants
from kvstore.protocol.master_messages import Locations


class Queries:
    """See the module. An unknown tenant has nothing, and a question makes none. Not thread-safe."""

    def __init__(self, rows: Rows, tenants: Tenants) -> None:
        self._rows, self._tenants = rows, tenants

    def exists(self, tenant: str, keys: Sequence[bytes]) -> bytes:
        """1 for each key that can be read now."""
        held = np.frombuffer(self._rows.holders, np.uint32)[self._find(tenant, keys)]
        return np.frombuffer(self._rows.sets.live, np.uint8)[held].tobytes()

    def match_prefix(self, tenant: str, keys: Sequence[bytes]) -> int:
        """How many keys can be read now, from the first on without a gap."""
        gap = self.exists(tenant, keys).find(0)
        return len(keys) if gap < 0 else gap

    def prefixes(self, tenant: str, keys: Sequence[bytes]) -> Prefixes:
        """How many of these keys, from the first on without a gap, can be read at each node."""
        return prefixes(self._rows, self._find(tenant, keys))

    def lookup(self, tenant: str, keys: Sequence[bytes], *, avoid: int = 0) -> Locations:
        """Where the keys are, at nodes that live and are not `avoid` (0: none)."""
        return locate(self._rows, self._find(tenant, keys), avoid=avoid)

    def list_keys(self, tenant: str, namespace: str | None = None, *, slice_rows: int = 65_536) -> Iterator[list[tuple[bytes, int, str]]]:
        """(key, size, namespace) of the blocks that can be read, of one namespace or all (None), `slice_rows` rows at a time.

        The directory may change between slices: a block that is there all the time is listed once.
        """
        rows, begin = self._rows, 0
        while begin < len(rows):
            owner, end = self._tenants.get(tenant), min(begin + slice_rows, len(rows))
            if owner is None:
                return
            listed = [
                (key, rows.sizes[row], rows.namespaces[rows.namespace_indexes[row]])
                for row in range(begin, end)
                if rows.sets.live[rows.holders[row]] and rows.tenant_indexes[row] == owner.index and (key := rows.keys[row]) is not None
            ]
            yield [entry for entry in listed if namespace in (None, entry[2])]
            begin = end

    def _find(self, tenant: str, keys: Sequence[bytes]) -> Indexes:
        """The row of each key, NO_ROW for those without. numpy then gathers a column in 4 us a 1,024 keys, an itemgetter in 30."""
        return np.fromiter(map(self._tenants.asked(tenant).rows.get, keys, repeat(NO_ROW)), np.intp, len(keys))
