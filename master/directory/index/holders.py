"""Interned sets of holders, shared by all blocks that are at the same nodes in the same tiers.

A million blocks have a handful of distinct sets, or some hundred thousand if replicas are at random pairs of a
thousand nodes. A block's row has only a set's index, and a query reads one flag of the set. An event of a whole node
(death, return, end of inventory) rewrites its sets and touches no block."""

from array import array
from collections.abc import Callable, Collection, Iterable
from typing import Final

HINT: Final = 0x40
"""State bit: known from the catalog or from before the node's inventory began, and not confirmed by the inventory
yet."""
TIERS: Final = 0x3F
"""Tier mask bits of a state."""
ABSENT, HINTED, CONFIRMED = 0, 1, 2
"""Presence of a block: no readable node is listed as a holder; one is, as a hint; one has confirmed it."""
MAX_REPLICAS: Final = 255
"""Replicas of a block in one response (a u8 on the wire)."""

Pairs = tuple[tuple[int, int], ...]
"""(node id, state) of each holder, by ascending node id."""


def with_holder(pairs: Pairs, node_id: int, state: int) -> Pairs:
    """Return `pairs` with `node_id` in `state`, added or replaced."""
    return tuple(sorted((*without_holder(pairs, node_id), (node_id, state))))


def without_holder(pairs: Pairs, node_id: int) -> Pairs:
    return tuple(pair for pair in pairs if pair[0] != node_id)


def has_holder(pairs: Pairs, node_id: int) -> bool:
    return any(pair[0] == node_id for pair in pairs)


class HolderSets:
    """Holder sets by index. `enter` and `leave` count the rows of each; an index without rows is reused.

    Index 0 is the empty set, of free rows and gone blocks: it is never counted and never live. A rewrite can leave
    two indexes with equal pairs: that is harmless, and the older one drains as its rows change. Not thread-safe."""

    def __init__(self) -> None:
        self.live = bytearray(1)
        """By index: 1 if a block with this set is readable."""
        self.presence = bytearray(1)
        """By index: ABSENT, HINTED or CONFIRMED, over the readable nodes."""
        self.replicas = bytearray(1)
        """By index: number of readable holders."""
        self.nodes = [b""]
        """By index: their node ids, packed u32; `tiers` has their tier masks, in the same order."""
        self.tiers: list[bytes] = [b""]
        self.empty: set[int] = set()
        """Indexes that lost all holders and still have rows, which wait for `Directory.delete_unheld`."""
        self.live_nodes: frozenset[int] = frozenset()
        """The readable nodes."""
        self._pairs: list[Pairs] = [()]
        self._rows = [0]
        self._index: dict[Pairs, int] = {}
        self._free: list[int] = []
        self._of_node: dict[int, set[int]] = {}
        """By node id: indexes of its sets. With random pairs of replicas there are many sets, and few of each node."""

    def __len__(self) -> int:
        """Upper bound of all indexes."""
        return len(self._pairs)

    def __getitem__(self, index: int) -> Pairs:
        return self._pairs[index]

    def enter(self, pairs: Pairs, count: int = 1) -> int:
        """Add `count` rows with `pairs`; return the set's index, 0 for the empty set."""
        if not pairs:
            return 0
        index = self._index.get(pairs)
        if index is None:
            index = self._new(pairs)
        self._rows[index] += count
        return index

    def leave(self, index: int, count: int = 1) -> None:
        """Remove `count` rows; a set without rows is dropped."""
        if not index:
            return
        self._rows[index] -= count
        if not self._rows[index]:
            self._forget(index)

    def rewrite(self, node_id: int, change: Callable[[int], int | None]) -> None:
        """Set the state of `node_id` to `change(state)` in all its sets, or remove it where that is None. O(its
        sets)."""
        for index in sorted(self._of_node.get(node_id, ())):
            pairs = self._pairs[index]
            state = dict(pairs)[node_id]
            if (changed := change(state)) == state:
                continue
            if self._index.get(pairs) == index:
                del self._index[pairs]
            rest = without_holder(pairs, node_id)
            self._place(index, rest if changed is None else with_holder(rest, node_id, changed))

    def sets_of(self, node_id: int) -> Collection[int]:
        """Return the indexes of the node's sets."""
        return self._of_node.get(node_id, ())

    def hinted_at(self, node_id: int) -> list[int]:
        """Return the sets in which the node is a hint. O(its sets)."""
        return [index for index in self._of_node.get(node_id, ()) if dict(self._pairs[index])[node_id] & HINT]

    def set_live(self, node_ids: Iterable[int]) -> None:
        """Set the readable nodes. O(sets of the nodes that change)."""
        former, self.live_nodes = self.live_nodes, frozenset(node_ids)
        for index in set[int]().union(*(self._of_node.get(node_id, ()) for node_id in former ^ self.live_nodes)):
            self._refresh(index)

    def readable_at(self, index: int) -> list[int]:
        """Return the readable node ids of a set, also those beyond MAX_REPLICAS."""
        return [node_id for node_id, _state in self._pairs[index] if node_id in self.live_nodes]

    def node_ids(self) -> set[int]:
        """Return all node ids in any set."""
        return set(self._of_node)

    def held_blocks(self) -> int:
        """Return the number of blocks with a holder, live or not."""
        return sum(count for count, pairs in zip(self._rows, self._pairs, strict=True) if pairs)

    def live_blocks(self) -> int:
        """Return the number of readable blocks."""
        return sum(count for count, live in zip(self._rows, self.live, strict=True) if live)

    def blocks_at(self, node_id: int) -> int:
        """Return the number of blocks that list `node_id`. O(its sets)."""
        return sum(map(self._rows.__getitem__, self._of_node.get(node_id, ())))

    def only_at(self, node_ids: Iterable[int], *, surely: bool = True) -> dict[int, int]:
        """Return the readable sets (index to rows) that only these nodes hold. Without `surely` also those with
        hints at other nodes. O(sets of these nodes)."""
        asked = frozenset(node_ids)
        theirs = set[int]().union(*(self._of_node.get(node_id, ()) for node_id in asked))
        found = [index for index in sorted(theirs) if self.live[index] and self._readable(index, named=not surely) <= asked]
        return {index: self._rows[index] for index in found}

    def mask(self, index: int) -> int:
        """Return the readable nodes of a set, as bits 1 << node id. Not stored: with 1,000 nodes it takes 140 bytes."""
        return sum(1 << node_id for node_id in self._readable(index))

    def _readable(self, index: int, *, named: bool = False) -> set[int]:
        """The readable nodes of a set; with `named` only those that confirmed it."""
        return {node_id for node_id, state in self._pairs[index] if node_id in self.live_nodes and not (named and state & HINT)}

    def check_integrity(self, column: Iterable[int]) -> None:
        """Assert that `column` (the set of every row) agrees with the counts and flags. For tests; O(rows)."""
        counted = [0] * len(self._pairs)
        for index in column:
            counted[index] += 1
        assert counted[1:] == self._rows[1:]
        assert all(self._pairs[index] == pairs for pairs, index in self._index.items())
        assert self.empty == {index for index in range(1, len(self._pairs)) if counted[index] and not self._pairs[index]}
        of_node: dict[int, set[int]] = {}
        for index, pairs in enumerate(self._pairs):
            for node_id, _state in pairs:
                of_node.setdefault(node_id, set()).add(index)
            assert list(array("I", self.nodes[index])) == self.readable_at(index)[:MAX_REPLICAS], index
            assert self.live[index] == bool(self.replicas[index]), index
            named = any(node_id in self.live_nodes and not state & HINT for node_id, state in pairs)
            assert self.presence[index] == (CONFIRMED if named else HINTED if self.live[index] else ABSENT), index
            assert len(self.nodes[index]) == 4 * len(self.tiers[index]) == 4 * self.replicas[index], index
        assert of_node == self._of_node

    def _new(self, pairs: Pairs) -> int:
        if self._free:
            index = self._free.pop()
        else:
            index = len(self._pairs)
            self._pairs.append(())
            self._rows.append(0)
            self.live.append(0)
            self.presence.append(ABSENT)
            self.replicas.append(0)
            self.nodes.append(b"")
            self.tiers.append(b"")
        self._place(index, pairs)
        return index

    def _place(self, index: int, pairs: Pairs) -> None:
        self._set(index, pairs)
        if pairs:
            self._index.setdefault(pairs, index)
        else:
            self.empty.add(index)
        self._refresh(index)

    def _forget(self, index: int) -> None:
        pairs = self._pairs[index]
        if self._index.get(pairs) == index:
            del self._index[pairs]
        self.empty.discard(index)
        self._set(index, ())
        self._refresh(index)
        self._free.append(index)

    def _set(self, index: int, pairs: Pairs) -> None:
        for node_id, _state in self._pairs[index]:
            sets = self._of_node[node_id]
            sets.remove(index)
            if not sets:
                del self._of_node[node_id]
        for node_id, _state in pairs:
            self._of_node.setdefault(node_id, set()).add(index)
        self._pairs[index] = pairs

    def _refresh(self, index: int) -> None:
        live = [pair for pair in self._pairs[index] if pair[0] in self.live_nodes]
        self.presence[index] = max((HINTED if state & HINT else CONFIRMED for _node_id, state in live), default=ABSENT)
        live = live[:MAX_REPLICAS]
        self.live[index] = bool(live)
        self.replicas[index] = len(live)
        self.nodes[index] = array("I", [node_id for node_id, _state in live]).tobytes()
        self.tiers[index] = bytes([state & TIERS for _node_id, state in live])
