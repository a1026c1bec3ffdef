"""Promises of columns.py: the columns are of one length, and the same whosever blocks they are said to be."""

from kvstore.store.blocks.columns import Columns


def test_columns_of_other_names_are_the_same_columns() -> None:
    columns = Columns()
    red, blue = columns.named("red", "ns"), columns.named("blue", "")
    assert (red.tenant, red.namespace, blue.tenant, blue.namespace) == ("red", "ns", "blue", "")
    columns.lengthen(3)
    red.sizes[2], red.held[1] = 2**64 - 1, 7
    red.free.append(2)
    assert (len(red), len(blue), blue.sizes[2], blue.held[1], blue.free) == (3, 3, 2**64 - 1, 7, [2])
    for one in (columns, red, blue):
        one.check_integrity()


def test_rows_that_are_made_are_of_nothing() -> None:
    columns = Columns()
    columns.lengthen(5)
    assert not any((*columns.held, *columns.readers, *columns.generations))
