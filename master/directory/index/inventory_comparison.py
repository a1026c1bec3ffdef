"""Comparison of the directory's view of a node with digests of the node's inventory (anti-entropy). Sans-I/O.

Only hints are compared: rows that list the node as a holder, and that its inventory has not confirmed. They are
summed by the node's runs (protocol/digests.py), and hints in equal runs are confirmed. No hint is added or changed
during an inventory; one that is removed meanwhile makes its run differ, or has a Drop command of its own. A removed
block that the node has not acknowledged is left out: the node then sends it, and gets a drop for it."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from kvstore.master.catalogs.interface import Change
from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.key_index import Found
from kvstore.master.directory.index.keys import Bools
from kvstore.master.directory.membership.members import NodeMember
from kvstore.protocol.catalog_messages import Digests
from kvstore.protocol.digests import Numbers, as_numbers, numbers, run_of
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.message import TIER_BITS

SLICE_ROWS: Final = 1 << 14
"""Rows compared in one time slice: 2 ms."""
_MASKS: Final = sum(TIER_BITS.values())


class DigestComparison:
    """`take` all messages, then run `steps`, a time slice each; then `flags` are the responses. Not thread-safe."""

    def __init__(self, parts: DirectoryParts, node: NodeMember) -> None:
        self._rows, self._tenants, self._record_policy = parts.rows, parts.tenants, parts.record_policy
        self._node_id = node.node_id
        self._limit = 2 * node.known_blocks
        self._messages: list[Digests] = []
        self._runs = 0
        self._seed = 0
        self._firsts = as_numbers(())
        self._counted = np.zeros(0, np.int64)
        self._sums = as_numbers(())
        self._removed = np.zeros(0, np.intp)
        self._tiers = np.zeros(0, np.uint8)
        self._equal: Bools = np.zeros(0, np.bool_)
        """Runs whose blocks are about to be confirmed."""
        self._same: Bools = np.zeros(0, np.bool_)
        """Runs whose blocks are confirmed. All false until all are: after a failed comparison the node sends every
        block, since the end of the inventory drops unconfirmed ones."""
        self.blocks = 0
        """Confirmed blocks."""

    def take(self, message: Digests) -> bool:
        """Add a message; return True if it is the last. Raises InvalidArgument for too many, invalid or missing
        runs; the comparison is over then."""
        self._runs += len(message.first_generations)
        if self._runs > self._limit:
            raise InvalidArgument(f"digests of {self._runs} runs, at most {self._limit} are allowed: send the whole inventory")
        if self._messages and self._messages[0].seed != message.seed:
            raise InvalidArgument("digests of one inventory differ in their seed: send all with one seed")
        if message.has_more and not len(message.first_generations):
            raise InvalidArgument("a digest message that is not the last has no runs")
        last = self._messages[-1].first_generations[-1:] if self._messages else ()
        first_generations = as_numbers((*last, *message.first_generations))
        if (first_generations[1:] <= first_generations[:-1]).any():
            raise InvalidArgument("runs are not in ascending order of generation")
        if len(message.first_generations) and not (min(message.counts) and 1 <= min(message.tiers) <= max(message.tiers) <= _MASKS):
            raise InvalidArgument("a run has no blocks, or unknown tiers")
        self._messages.append(message)
        self._same = np.zeros(self._runs, np.bool_)
        return not message.has_more

    def steps(self) -> Iterator[list[Change]]:
        """Compare some rows in each step; yields catalog operations that need no wait."""
        self._begin()
        yield []
        yield from self._find_removed()
        end = 0
        while end < len(self._rows):  # grows meanwhile
            self._sum(end)
            end += SLICE_ROWS
            yield []
        self._decide()
        for begin in range(0, end, SLICE_ROWS):
            yield self._confirm(begin)
        self._same = self._equal

    def flags(self) -> list[bytes]:
        """Return one byte a run, for each message; all 0 until `steps` are over."""
        ends = np.cumsum([len(message.first_generations) for message in self._messages])[:-1]
        return [part.astype(np.uint8).tobytes() for part in np.split(self._same, ends)]

    def _begin(self) -> None:
        self._seed = self._messages[0].seed
        self._firsts = np.concatenate([as_numbers(message.first_generations) for message in self._messages])
        self._tiers = np.frombuffer(b"".join(message.tiers for message in self._messages), np.uint8)
        self._counted = np.zeros(self._runs, np.int64)
        self._sums = np.zeros(self._runs, np.uint64)

    def _find_removed(self) -> Iterator[list[Change]]:
        """Find the rows of removed blocks. Blocks that are removed later get a drop command of their own."""
        found = [self._removed]
        for tenant in list(self._tenants):
            removed = list(tenant.removed.items())
            for begin in range(0, len(removed), SLICE_ROWS):
                keys, generations = zip(*removed[begin : begin + SLICE_ROWS], strict=True)
                rows = np.array(tenant.rows.find(keys), np.intp)
                found.append(rows[np.frombuffer(self._rows.generations, np.uint64)[rows] <= as_numbers(generations)])
                yield []
        self._removed = np.concatenate(found)

    def _sum(self, begin: int) -> None:
        rows, runs = self._hinted(begin)
        columns = (np.frombuffer(wide, np.uint64)[rows] for wide in (self._rows.generations, self._rows.checksums, self._rows.sizes))
        np.add.at(self._counted, runs, 1)
        np.add.at(self._sums, runs, numbers(self._seed, *columns))

    def _decide(self) -> None:
        counts = np.frombuffer(b"".join(message.counts for message in self._messages), np.uint8)
        sums = np.concatenate([as_numbers(message.sums) for message in self._messages])
        self._equal = (self._counted == counts) & (self._sums == sums)

    def _confirm(self, begin: int) -> list[Change]:
        rows, runs = self._hinted(begin)
        is_same = self._equal[runs]
        rows, runs = rows[is_same], runs[is_same]
        if not len(rows):
            return []
        self._rows.set_tiers(rows, self._node_id, self._tiers[runs])
        self.blocks += len(rows)
        if self._record_policy.is_all:
            return []
        ops: list[Change] = []
        for row in rows.tolist():
            ops += self._record_policy.settle(self._tenants.at(self._rows.tenant_indexes[row]), self._rows.keys[row])
        return ops

    def _hinted(self, begin: int) -> tuple[Found, Found]:
        """Return the rows of a slice with the node as a hint, that are not removed and are in a run, and their runs."""
        is_hint = np.zeros(len(self._rows.sets), np.bool_)
        is_hint[self._rows.sets.hinted_at(self._node_id)] = True
        end = min(begin + SLICE_ROWS, len(self._rows))
        rows = np.flatnonzero(is_hint[np.frombuffer(self._rows.holders, np.uint32)[begin:end]]) + begin
        if len(self._removed):
            rows = rows[~np.isin(rows, self._removed)]
        generations: Numbers = np.frombuffer(self._rows.generations, np.uint64)[rows]
        runs = run_of(self._firsts, generations)
        return rows[runs >= 0], runs[runs >= 0]
