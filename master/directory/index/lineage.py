"""Parents of rows in any order, in two columns: each row's parent, and its number of children. No row becomes its own
ancestor.

A catalog's reader may see a block before its parent, so parents need not be older than their children. A row without
children closes no cycle; for any other one the ancestors of its parent are walked. For a batch, all chains are
walked together, a step for all at once: one by one takes five times as long."""

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.master.directory.index.keys import NO_ROW

Numbers = npt.NDArray[np.uint32]

NO_PARENT: Final = NO_ROW
MAX_LINEAGE: Final = 65_536
"""Ancestors checked for a cycle, some milliseconds: the blocks of 16 tokens in a prompt of a million. A longer chain
is cut there; otherwise crafted parents could keep a master busy for ever."""
MAX_TOGETHER: Final = 64
"""Steps of the joint walk. Most chains are shorter; if one is not, each row is checked alone."""


def adopt_all(parents: "array[int]", children: "array[int]", rows: Numbers, above: Numbers) -> None:
    """Set the parents of rows, which are different and have none, to `above`. Skips a parent that is the row itself,
    a descendant of it, or has too many ancestors to tell."""
    is_other = rows != above
    rows, above = rows[is_other], above[is_other]
    if not _adopt_together(np.frombuffer(parents, np.uint32), np.frombuffer(children, np.uint32), rows, above):
        for row, parent in zip(rows.tolist(), above.tolist(), strict=True):
            if not children[row] or _is_apart(parents, parent, row):
                parents[row] = parent
                children[parent] += 1


def _adopt_together(parents: Numbers, children: Numbers, rows: Numbers, above: Numbers) -> bool:
    """Adopt all, and return True, if all chains end soon: then no order closes a cycle. Else return False, with
    nothing changed."""
    parents[rows] = above
    np.add.at(children, above, 1)
    line = above[children[rows] > 0]  # the others have no children, and are in no chain
    for _ in range(min(MAX_TOGETHER, MAX_LINEAGE)):
        line = line[line != NO_PARENT]
        if not len(line):
            return True
        line = parents[line]
    parents[rows] = NO_PARENT
    np.subtract.at(children, above, 1)
    return False


def _is_apart(parents: "array[int]", row: int, other: int) -> bool:
    """Return True if neither the row nor an ancestor is `other`."""
    for _ in range(MAX_LINEAGE):
        if row in (NO_PARENT, other):
            return row == NO_PARENT
        row = parents[row]
    return False
