"""Tests of contents.py: copies of a directory's columns, whole or torn."""

import numpy as np

from kvstore.master.directory.index.contents import LIVE, ContentsColumns, copied, joined, segments, usage
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.protocol.catalog_messages import EVENT_REMOVED
from tests.master.blocks import DRAM, NVME, TENANT, Event, Master, die, one_node


def copy(master: Master, slice_rows: int = 1000) -> ContentsColumns:
    *slices, columns = copied(*master.directory.columns(), slice_rows=slice_rows)
    assert set(slices) == {None}
    assert columns is not None
    return columns


def test_a_copy_tells_of_each_row_whatever_the_slices() -> None:
    master, node = one_node()
    master.publish(node, Event(b"a", size=5), Event(b"b", size=7, parent=b"a", tiers=NVME), Event(b"x", tenant="blue"))
    whole, sliced = copy(master), copy(master, 1)
    assert whole.sizes.tolist() == sliced.sizes.tolist()
    assert sorted(whole.sizes.tolist()) == [0, 5, 7, 100]
    assert whole.row_masks().tolist() == sliced.row_masks().tolist()
    assert sorted(whole.row_masks().tolist()) == [0, LIVE | DRAM, LIVE | DRAM, LIVE | NVME]
    assert sorted(whole.tenant_names.values()) == ["blue", TENANT]
    assert {whole.namespace_names[index] for index in whole.namespaces.tolist()} == {"", "ns"}


def test_usage_counts_live_blocks_in_all_tiers() -> None:
    master, _node = one_node(b"a")
    other = master.register("b")
    master.sync(other, Event(b"a", tiers=NVME), Event(b"b"))
    master.directory.pins.pin(TENANT, [b"a"], pinned=True)
    assert sorted(copy(master).row_masks().tolist()) == [0, LIVE | DRAM, LIVE | DRAM | NVME]
    assert list(copy(master).pins.values()) == [1]
    die(master, other)
    assert sorted(copy(master).row_masks().tolist()) == [0, 0, LIVE | DRAM]


def test_changes_between_slices_break_nothing() -> None:
    master, node = one_node(*(bytes([n]) for n in range(6)))
    slices = copied(*master.directory.columns(), slice_rows=2)
    next(slices)
    other = master.register("b")
    master.sync(other, *(Event(bytes([n]), tiers=NVME) for n in range(6, 12)))
    master.publish(node, Event(b"\x05", 1, EVENT_REMOVED))
    *_, columns = slices
    assert columns is not None
    assert len(columns.row_masks()) == len(columns.sizes) == 7
    columns.masks = columns.masks[:1]  # as if the sets of holders had come after they were copied
    assert set(columns.row_masks().tolist()) == {0}


def test_tables_of_partitions_are_joined_as_if_they_were_one() -> None:
    first, a = one_node()
    second, b = one_node()
    first.publish(a, Event(b"a", size=5), Event(b"x", tenant="blue", size=1))
    second.publish(b, Event(b"z", tenant="green", size=3), Event(b"p", size=9), Event(b"b", size=7, parent=b"p", tiers=NVME))
    first.directory.pins.pin(TENANT, [b"a"], pinned=True)
    second.directory.pins.pin(TENANT, [b"b"], pinned=True)
    parts = [copy(first), copy(second)]
    rows = [{key: int(one.directory.queries.rows_of(TENANT, [key])[0]) for key in (b"a", b"b", b"p")} for one in (first, second)]
    begin = len(parts[0].sizes)
    nothing = np.zeros(0, np.uint32)
    stands_for = np.array([rows[1][b"p"]], np.uint32), np.array([rows[0][b"a"]], np.uint32)
    whole, begins = joined(parts, [(nothing, nothing), stands_for])
    assert begins == [0, begin]
    assert whole.sizes.tolist() == [*parts[0].sizes.tolist(), *parts[1].sizes.tolist()]
    assert whole.row_masks().tolist() == [*parts[0].row_masks().tolist(), *parts[1].row_masks().tolist()]
    assert whole.parents[rows[1][b"b"] + begin] == rows[0][b"a"]
    used = {(one.tenant, one.namespace): (one.held.blocks, one.pinned) for one in usage(whole, None, limit=9)}
    expected = {(one.tenant, one.namespace): one.held.blocks for part in parts for one in usage(part, None, limit=9)}
    assert {name: blocks for name, (blocks, _pinned) in used.items()} == expected | {
        (TENANT, "ns"): sum(one.held.blocks for part in parts for one in usage(part, TENANT, limit=9))
    }
    assert used[TENANT, "ns"][1] == 2


def test_a_parent_that_came_after_the_copy_was_begun_is_none() -> None:
    master, node = one_node(*(bytes([n]) for n in range(4)))
    slices = copied(*master.directory.columns(), slice_rows=2)
    next(slices)
    master.publish(node, Event(b"parent", 9))
    master.publish(node, Event(b"\x03", 1, EVENT_REMOVED))
    master.publish(node, Event(b"child", 9, parent=b"parent"))
    *_, columns = slices
    assert columns is not None
    row = int(master.directory.queries.rows_of(TENANT, [b"child"])[0])
    assert (row, columns.parents[row]) == (4, NO_ROW), "in the row of the one that is gone"
    assert segments(columns, TENANT, "ns", limit=9)
