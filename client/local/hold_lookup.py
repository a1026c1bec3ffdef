"""Lookups that hold what they find on this host: each node is told in shared memory which of its blocks are to stay, without a message.

A hold is written before the entries are compared once more: what is the same then had not left, and the node sees the hold before it looks
for a block that may leave.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.client.local.nodes import LocalNode
from kvstore.client.local.reads import Nodes, look_up
from kvstore.client.local.shared_index import Flags, Indexes, SharedIndexReader
from kvstore.protocol.shared_index import Words

Found = tuple[LocalNode, SharedIndexReader, Indexes, Words, Indexes, Words]
"""Of one node: its index, of which keys, their access words, and the entries with their sequences."""


class LocalHoldLookup:
    """One lookup of some keys. Thread-confined; it asks nobody."""

    def __init__(self, nodes: Nodes, keys: Sequence[bytes], lengths: set[int]) -> None:
        self._count = len(keys)
        self._found: list[Found] = _found(nodes, keys, lengths)
        if nodes and sum(len(indexes) for _, _, indexes, *_ in self._found) == len(keys):
            nodes[0].desk.asked()

    def hold(self, number: int, until_ns: int | None, *, is_prefix: bool) -> "HoldLookupResult":
        """Hold what was found, or of it the blocks before the first that was not. None: nothing can be held."""
        outcome = HoldLookupResult(np.zeros(self._count, bool))
        is_here = outcome.is_here
        for _, _, indexes, *_ in self._found:
            is_here[indexes] = True
        limit = self._count if not is_prefix or is_here.all() else int(is_here.argmin())
        for node, index, indexes, words, at, sequences in self._found:
            wanted = indexes < limit
            count = int(wanted.sum())
            if not count:
                continue
            if until_ns is None or not node.desk.hold(number, until_ns, words if count == len(words) else words[wanted]):
                outcome.unheld += count
                continue
            outcome.told.append(node)
            outcome.held += count
            is_here[indexes] = index.sequences[at] == sequences
        return outcome


@dataclass(slots=True)
class HoldLookupResult:
    """What came of a lookup: which keys were found and are there still, which nodes were told to hold how many of them, and how many they
    were not told of, for want of space."""

    is_here: Flags
    told: list[LocalNode] = field(default_factory=list)
    held: int = 0
    unheld: int = 0


def _found(nodes: Nodes, keys: Sequence[bytes], lengths: set[int]) -> list[Found]:
    found: dict[LocalNode, Found] = {}
    for node, index, indexes, batch in look_up(nodes, keys, lengths):
        more = (node, index, indexes[batch.which], index.access_words(batch), batch.at, batch.sequences)
        if node not in found:
            found[node] = more
        elif found[node][1] is index:  # of another length; an index that has grown since is of other entries
            found[node] = _in_order(found[node], more)
    return list(found.values())


def _in_order(first: Found, second: Found) -> Found:
    """Both, in the order of the keys: where not all can be held, those are that come first."""
    columns = [np.concatenate(pair) for pair in zip(first[2:], second[2:], strict=True)]
    order = np.argsort(columns[0])
    indexes, words, at, sequences = (column[order] for column in columns)
    return (first[0], first[1], indexes, words, at, sequences)
