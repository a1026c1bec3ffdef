"""Queries of the directory: which keys can be read now, where, and how much of a prompt each node has. They change nothing.

The hot path: a few C loops over columns (rows.py) a batch."""

import fnmatch
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.master.directory.index.key_index import FEW
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.index.rows import Rows
from kvstore.master.directory.index.tenants import Tenant, Tenants
from kvstore.protocol.frames import MAX_COUNT
from kvstore.protocol.master_messages import Locations

Indexes = NDArray[np.intp]


def locate(rows: Rows, found: Indexes, *, avoid: int = 0) -> Locations:
    """Where the blocks of the rows `found` (NO_ROW: a miss) are, at nodes that live and are not `avoid` (0: none). Where these are more
    than a message takes, as many are told of each block."""
    sets = rows.sets
    found = found.copy()
    held = np.frombuffer(rows.holders, np.uint32)[found]
    replicas = np.frombuffer(sets.replicas, np.uint8)[held]
    found[replicas == 0] = NO_ROW
    if int(replicas.sum(dtype=np.int64)) > MAX_COUNT:
        most = MAX_COUNT // len(held)
        nodes, tiers = _some_of(rows, held, found, most)
        replicas = np.minimum(replicas, most)
    elif len(held) and (held == held[0]).all():  # as a rule: a chain's blocks are together
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
    """Nodes and tiers of so many replicas a block at most: those from one on that its generation says, so that reads are spread."""
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
    """`answer` without the replicas at node `avoid`; a block that is only there is a miss."""
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
    """`blocks` of the prompt from the first on, by node id, for the nodes that have any; `block_bytes` is what a block takes on average."""

    blocks: dict[int, int]
    block_bytes: int


class PrefixPart(NamedTuple):
    """The blocks of a prompt that one table knows of: its rows `found` (NO_ROW: nowhere), which are the prompt's blocks `places`."""

    rows: Rows
    found: Indexes
    places: Sequence[int]


PART_BITS: Final = 32
"""Of the number of a set of holders, above which that of its table stands."""


def prefixes(parts: Sequence[PrefixPart]) -> PrefixMatches:
    """Of the prompt whose blocks are in these tables, at nodes that can be read from now.

    Most blocks of a prompt are at the same nodes, and have the same set of holders: a node loses its run at the first block with a set
    that it is not in. So the work is a sort of the sets' numbers, and a step in Python for each set there is.
    """
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
    """The numbers of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class DirectoryQueries:
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

    def prefixes(self, tenant: str, keys: Sequence[bytes]) -> PrefixMatches:
        """How many of these keys, from the first on without a gap, can be read at each node."""
        return prefixes([self.part(tenant, keys, range(len(keys)))])

    def part(self, tenant: str, keys: Sequence[bytes], places: Sequence[int]) -> PrefixPart:
        """Of a prompt the blocks `places`, which have these keys."""
        return PrefixPart(self._rows, self._find(tenant, keys), places)

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
