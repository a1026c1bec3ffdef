"""Parents of rows that come in any order, as two columns: a row's parent, and how many children a row has. No row becomes its own ancestor.

Whoever is told of a block before its parent, as a catalog's reader is, cannot rely on parents being older than their children. A row
without children closes no cycle; for any other one the line above its parent is walked. Of many rows together the lines are walked at
once, a step for all of them: one by one takes five times as long.
"""

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.master.directory.index.keys import NO_ROW

Numbers = npt.NDArray[np.uint32]

NO_PARENT: Final = NO_ROW
MAX_LINEAGE: Final = 65_536
"""Ancestors that are looked at for a cycle, some milliseconds: as many as a prompt of a million tokens has blocks of 16. A longer line is
cut there: whoever says who is whose parent could else keep a master that reads a catalog at it for ever."""
MAX_TOGETHER: Final = 64
"""Steps that the lines of many rows are walked together: most are shorter, and where one is not each row is looked at by itself."""


def adopt_all(parents: "array[int]", children: "array[int]", rows: Numbers, above: Numbers) -> None:
    """Give these rows, all different and without a parent, those `above`, one after the other: but where that is the row, a descendant of
    it, or has too many ancestors to tell."""
    is_other = rows != above
    rows, above = rows[is_other], above[is_other]
    if not _adopt_together(np.frombuffer(parents, np.uint32), np.frombuffer(children, np.uint32), rows, above):
        for row, parent in zip(rows.tolist(), above.tolist(), strict=True):
            if not children[row] or _is_apart(parents, parent, row):
                parents[row] = parent
                children[parent] += 1


def _adopt_together(parents: Numbers, children: Numbers, rows: Numbers, above: Numbers) -> bool:
    """All of them, if every line above them ends soon: then no order closes a cycle. Else False, with nothing done."""
    parents[rows] = above
    np.add.at(children, above, 1)
    line = above[children[rows] > 0]  # the others are nobody's parents, and in no line
    for _ in range(min(MAX_TOGETHER, MAX_LINEAGE)):
        line = line[line != NO_PARENT]
        if not len(line):
            return True
        line = parents[line]
    parents[rows] = NO_PARENT
    np.subtract.at(children, above, 1)
    return False


def _is_apart(parents: "array[int]", row: int, other: int) -> bool:
    """Neither the row nor an ancestor of it is `other`."""
    for _ in range(MAX_LINEAGE):
        if row in (NO_PARENT, other):
            return row == NO_PARENT
        row = parents[row]
    return False
