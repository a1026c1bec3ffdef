"""Lookups that hold what they find on this host, by writing to shared memory instead of sending a message.

The hold is written before the entries are validated a second time. An entry that is unchanged then had not been evicted
before the hold, and the node sees the hold before its next eviction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.client.local.nodes import LocalNode
from kvstore.client.local.reads import Nodes, look_up
from kvstore.client.local.shared_index import Flags, Indexes, SharedIndexReader
from kvstore.protocol.shared_index import Words

Found = tuple[LocalNode, SharedIndexReader, Indexes, Words, Indexes, Words]
"""Matches at one node: node, index, key indexes, access words, entry numbers, sequences."""


class LocalHoldLookup:
    """One lookup of a batch of keys in the local indexes. Single-threaded; sends nothing."""

    def __init__(self, nodes: Nodes, keys: Sequence[bytes], lengths: set[int]) -> None:
        self._count = len(keys)
        self._found: list[Found] = _found(nodes, keys, lengths)
        if nodes and sum(len(indexes) for _, _, indexes, *_ in self._found) == len(keys):
            nodes[0].reader_slots.count_call()

    def hold(self, number: int, until_ns: int | None, *, is_prefix: bool) -> "HoldLookupResult":
        """Hold what was found, with `is_prefix` only the blocks before the first miss. `until_ns` None: hold
        nothing."""
        outcome = HoldLookupResult(np.zeros(self._count, bool))
        is_here = outcome.is_here
        for _, _, indexes, *_ in self._found:
            is_here[indexes] = True
        limit = self._count if not is_prefix or is_here.all() else int(is_here.argmin())
        for node, index, indexes, words, at, sequences in self._found:
            is_held = indexes < limit
            count = int(is_held.sum())
            if not count:
                continue
            if until_ns is None or not node.reader_slots.hold(number, until_ns, words if count == len(words) else words[is_held]):
                outcome.unheld += count
                continue
            outcome.holding.append(node)
            outcome.held += count
            is_here[indexes] = index.sequences[at] == sequences
        return outcome


@dataclass(slots=True)
class HoldLookupResult:
    """Result of a local lookup: which keys are present, which nodes hold blocks, and how many blocks are held or did
    not fit."""

    is_here: Flags
    holding: list[LocalNode] = field(default_factory=list)
    held: int = 0
    unheld: int = 0


def _found(nodes: Nodes, keys: Sequence[bytes], lengths: set[int]) -> list[Found]:
    found: dict[LocalNode, Found] = {}
    for node, index, indexes, batch in look_up(nodes, keys, lengths):
        more = (node, index, indexes[batch.which], index.access_words(batch), batch.at, batch.sequences)
        if node not in found:
            found[node] = more
        elif found[node][1] is index:  # keys of another length; a replaced index has other entry numbers
            found[node] = _in_order(found[node], more)
    return list(found.values())


def _in_order(first: Found, second: Found) -> Found:
    """Merge two sets of matches in key order: if not all fit, the first keys are held."""
    columns = [np.concatenate(pair) for pair in zip(first[2:], second[2:], strict=True)]
    order = np.argsort(columns[0])
    indexes, words, at, sequences = (column[order] for column in columns)
    return (first[0], first[1], indexes, words, at, sequences)
