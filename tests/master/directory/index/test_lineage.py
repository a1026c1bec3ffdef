"""Tests of lineage.py: in any order of parents no row is its own ancestor, and a batch gives the same as single
calls."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.master.directory.index import lineage
from kvstore.master.directory.index.lineage import NO_PARENT, adopt_all

ROWS = 12


class Forest:
    """The two columns, of rows 1 to ROWS - 1."""

    def __init__(self) -> None:
        self.parents, self.children = array("I", bytes(4 * ROWS)), array("I", bytes(4 * ROWS))

    def adopt(self, links: dict[int, int]) -> None:
        adopt_all(self.parents, self.children, np.array(list(links), np.uint32), np.array(list(links.values()), np.uint32))

    def told(self) -> dict[int, int]:
        """Parents by row, of those that have one; asserts that children are counted and lines end."""
        for row in range(1, ROWS):
            assert self.children[row] == list(self.parents).count(row)
            line = row
            for _ in range(ROWS):
                line = self.parents[line] if line else 0
            assert line == NO_PARENT
        return {row: parent for row, parent in enumerate(self.parents) if parent}


def one_by_one(*parts: dict[int, int]) -> dict[int, int]:
    """Return the accepted links, computed naively."""
    taken: dict[int, int] = {}
    for row, parent in [link for part in parts for link in part.items()]:
        line = [parent]
        while line[-1] in taken:
            line.append(taken[line[-1]])
        if row not in line and row not in taken:
            taken[row] = parent
    return taken


links = st.dictionaries(st.integers(1, ROWS - 1), st.integers(1, ROWS - 1))


@given(st.lists(links, max_size=4))
def test_many_together_end_as_one_by_one(parts: list[dict[int, int]]) -> None:
    forest = Forest()
    for part in parts:
        forest.adopt({row: parent for row, parent in part.items() if row not in forest.told()})
    assert forest.told() == one_by_one(*parts)


@pytest.mark.parametrize("together", [1, 2, 64])
def test_long_chains_are_walked_one_by_one(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(lineage, "MAX_TOGETHER", together)
    forest = Forest()
    chain = {row: row + 1 for row in range(1, ROWS - 1)}
    forest.adopt({row: parent for row, parent in chain.items() if row % 2})
    forest.adopt({row: parent for row, parent in chain.items() if row % 2 == 0})
    assert forest.told() == chain


@pytest.mark.parametrize("together", [1, 64])
def test_row_with_children_gets_no_too_deep_parent(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(lineage, "MAX_TOGETHER", together)
    monkeypatch.setattr(lineage, "MAX_LINEAGE", 3)
    forest = Forest()
    forest.adopt({2: 1, 3: 2, 4: 3})  # each without children as its turn comes: taken without a look
    forest.adopt({6: 5, 8: 7})
    forest.adopt({5: 3, 7: 2, 9: 4})
    assert forest.told() == {2: 1, 3: 2, 4: 3, 6: 5, 8: 7, 7: 2, 9: 4}
