"""Lookups in the directory: readable keys, their locations, and each node's prefix of a prompt. Read-only.

The hot path: a few C loops over columns (rows.py) a batch."""

import fnmatch
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.master.directory.index.key_index import SMALL_BATCH
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.index.rows import Rows
from kvstore.master.directory.index.tenants import Tenant, Tenants
from kvstore.protocol.frames import MAX_COUNT
from kvstore.protocol.master_messages import Locations
from kvstore.protocol.message import TIER_BITS

Indexes = NDArray[np.intp]


def locate(rows: Rows, found: Indexes, *, avoid: int = 0) -> Locations:
    """Return the locations of the blocks of rows `found` (NO_ROW: a miss), at live nodes other than `avoid` (0:
    none). If they exceed a message, the replicas of each block are limited."""
    sets = rows.sets
    found = found.copy()
    held = np.frombuffer(rows.holders, np.uint32)[found]
    replicas = np.frombuffer(sets.replicas, np.uint8)[held]
    found[replicas == 0] = NO_ROW
    if int(replicas.sum(dtype=np.int64)) > MAX_COUNT:
        most = MAX_COUNT // len(held)
        nodes, tiers = _some_of(rows, held, found, most)
        replicas = np.minimum(replicas, most)
    elif len(held) and (held == held[0]).all():  # usual: a chain's blocks are at the same nodes
        nodes, tiers = sets.nodes[held[0]] * len(held), sets.tiers[held[0]] * len(held)
    else:
        held_list = held.tolist()
        nodes, tiers = b"".join(map(sets.nodes.__getitem__, held_list)), b"".join(map(sets.tiers.__getitem__, held_list))
    answer = Locations(
        replicas.tobytes(),
        _picked(rows.sizes, found),
        _picked(rows.checksums, found),
        _picked(rows.generations, found),
        array("I", nodes),
        tiers,
    )
    return _without(answer, avoid) if avoid and avoid in answer.nodes else answer


def _some_of(rows: Rows, held: NDArray[np.uint32], found: Indexes, most: int) -> tuple[bytes, bytes]:
    """Return nodes and tiers of at most `most` replicas a block. The block's generation selects the first one, which
    spreads reads."""
    nodes, tiers = bytearray(), bytearray()
    for index, generation in zip(held.tolist(), _picked(rows.generations, found), strict=True):
        its_nodes, its_tiers = rows.sets.nodes[index], rows.sets.tiers[index]
        if len(its_tiers) > most:
            first = generation % len(its_tiers)
            its_nodes = (2 * its_nodes)[4 * first : 4 * (first + most)]
            its_tiers = (2 * its_tiers)[first : first + most]
        nodes += its_nodes
        tiers += its_tiers
    return bytes(nodes), bytes(tiers)


def _picked(column: "array[int]", rows: Indexes) -> "array[int]":
    return array("Q", np.frombuffer(column, np.uint64)[rows].tobytes())


def _without(answer: Locations, avoid: int) -> Locations:
    """Return `answer` without the replicas at node `avoid`; a block that is only there is a miss."""
    replicas, at, kept = bytearray(answer.replicas), 0, array("I")
    tiers = bytearray()
    for index, count in enumerate(answer.replicas):
        for node_id, mask in zip(answer.nodes[at : at + count], answer.tiers[at : at + count], strict=True):
            if node_id == avoid:
                replicas[index] -= 1
            else:
                kept.append(node_id)
                tiers.append(mask)
        at += count

    def present(column: Sequence[int]) -> "array[int]":
        return array("Q", [value if count else 0 for value, count in zip(column, replicas, strict=True)])

    return Locations(bytes(replicas), present(answer.sizes), present(answer.checksums), present(answer.generations), kept, bytes(tiers))


@dataclass(frozen=True, slots=True)
class PrefixMatches:
    """Leading blocks of the prompt by node id, for nodes with any; `block_bytes` is the average block size."""

    blocks: dict[int, int]
    block_bytes: int


class PrefixPart(NamedTuple):
    """Blocks of a prompt in one table: rows `found` (NO_ROW: missing) of the prompt's blocks `places`."""

    rows: Rows
    found: Indexes
    places: Sequence[int]


PART_BITS: Final = 32
"""Bits of a holder set's index; the table's number is above them."""


def prefixes(parts: Sequence[PrefixPart]) -> PrefixMatches:
    """Return the prefixes of a prompt at the readable nodes, over all tables.

    Most blocks of a prompt have the same set of holders. A node's prefix ends at the first block with a set that it
    is not in. So the work is a sort of the sets' indexes, and a Python step for each distinct set."""
    count = sum(len(part.places) for part in parts)
    held, sizes = np.zeros(count, np.uint64), np.zeros(count, np.uint64)
    for number, (rows, found, places) in enumerate(parts):
        at = np.fromiter(places, np.intp, len(places))
        held[at] = np.frombuffer(rows.holders, np.uint32)[found].astype(np.uint64) + np.uint64(number << PART_BITS)
        sizes[at] = np.frombuffer(rows.sizes, np.uint64)[found]

    def mask(index: int) -> int:
        return parts[index >> PART_BITS].rows.sets.mask(index & ((1 << PART_BITS) - 1))

    sets, first = np.unique(held, return_index=True)
    order = np.argsort(first)
    blocks: dict[int, int] = {}
    left = mask(int(held[0])) if count else 0
    for index, begin in zip(sets[order].tolist(), first[order].tolist(), strict=True):
        lost = left & ~mask(index)
        if lost:
            left ^= lost
            blocks.update(dict.fromkeys(_bits(lost), begin))
            if not left:
                break
    blocks.update(dict.fromkeys(_bits(left), count))
    longest = max(blocks.values(), default=0)
    return PrefixMatches(blocks, int(sizes[:longest].mean()) if longest else 0)


def _bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class DirectoryQueries:
    """Lookups by tenant and key. An unknown tenant has no blocks, and a lookup does not create it. Not thread-safe."""

    def __init__(self, rows: Rows, tenants: Tenants) -> None:
        self._rows, self._tenants = rows, tenants

    def exists(self, tenant: str, keys: Sequence[bytes]) -> bytes:
        """Return 1 for each readable key."""
        return self._of_sets(tenant, keys, self._rows.sets.live)

    def presence(self, tenant: str, keys: Sequence[bytes]) -> bytes:
        """Return ABSENT, HINTED or CONFIRMED for each key: see holders.py."""
        return self._of_sets(tenant, keys, self._rows.sets.presence)

    def _of_sets(self, tenant: str, keys: Sequence[bytes], column: bytearray) -> bytes:
        """Return the value of `column` for each key's holder set."""
        if len(keys) <= SMALL_BATCH:
            index, holders = self._tenants.lookup(tenant).rows, self._rows.holders
            return bytes([column[holders[index.get(key)]] for key in keys])
        held = np.frombuffer(self._rows.holders, np.uint32)[self._find(tenant, keys)]
        return np.frombuffer(column, np.uint8)[held].tobytes()

    def match_prefix(self, tenant: str, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys that are readable without a gap."""
        gap = self.exists(tenant, keys).find(0)
        return len(keys) if gap < 0 else gap

    def prefixes(self, tenant: str, keys: Sequence[bytes]) -> PrefixMatches:
        """Return, for each node, the number of leading keys that are readable there without a gap."""
        return prefixes([self.part(tenant, keys, range(len(keys)))])

    def part(self, tenant: str, keys: Sequence[bytes], places: Sequence[int]) -> PrefixPart:
        """Return this table's part of a prompt: the blocks `places`, which have these keys."""
        return PrefixPart(self._rows, self._find(tenant, keys), places)

    def rows_of(self, tenant: str, keys: Sequence[bytes]) -> Indexes:
        """Return the rows of the keys, NO_ROW for missing ones."""
        return self._find(tenant, keys)

    def lookup(self, tenant: str, keys: Sequence[bytes], *, avoid: int = 0) -> Locations:
        """Return the locations of the keys, at live nodes other than `avoid` (0: none)."""
        return locate(self._rows, self._find(tenant, keys), avoid=avoid)

    def outside_dram(self, tenant: str, keys: Sequence[bytes], node_id: int) -> list[bytes]:
        """Return the keys of which node `node_id` has no copy in DRAM by this table, in order. Keys of other partitions
        are among them. A set lookup for each distinct holder set."""
        held = np.frombuffer(self._rows.holders, np.uint32)[self._find(tenant, keys)]
        in_dram = {index: dict(self._rows.sets[index]).get(node_id, 0) & TIER_BITS["dram"] for index in np.unique(held).tolist()}
        return [key for key, index in zip(keys, held.tolist(), strict=True) if not in_dram[index]]

    def list_keys(self, tenant: str, namespace: str | None = None, *, slice_rows: int = 65_536) -> Iterator[list[tuple[bytes, int, str]]]:
        """Yield (key, size, namespace) of the readable blocks of one namespace or all (None), `slice_rows` rows at a
        time.

        The directory may change between slices: a block that exists all the time is listed once."""
        rows = self._rows
        for owner, part in self._slices(tenant, slice_rows):
            listed = [
                (rows.keys[row], rows.sizes[row], rows.namespaces[rows.namespace_indexes[row]])
                for row in part
                if rows.sets.live[rows.holders[row]] and rows.tenant_indexes[row] == owner.index
            ]
            yield [entry for entry in listed if namespace in (None, entry[2])]

    def held_keys(self, tenant: str, namespace: str | None, pattern: str, *, slice_rows: int) -> Iterator[list[bytes]]:
        """Yield the keys of blocks with holders, live or not, in one namespace or all (None), that match the shell
        `pattern` (UTF-8). `slice_rows` rows at a time, as `list_keys`."""
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
        """Yield ranges over all rows, including those added meanwhile; stops if the tenant is gone."""
        begin = 0
        while begin < len(self._rows) and (owner := self._tenants.get(tenant)) is not None:
            end = min(begin + slice_rows, len(self._rows))
            yield owner, range(begin, end)
            begin = end

    def _find(self, tenant: str, keys: Sequence[bytes]) -> Indexes:
        return self._tenants.lookup(tenant).rows.find(keys)
