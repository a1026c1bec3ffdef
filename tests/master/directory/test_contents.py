"""Promises of contents.py: copies of a directory's columns, whole or torn."""

from kvstore.master.directory.contents import LIVE, Columns, copied
from kvstore.protocol.catalog_messages import EVENT_GONE
from tests.master.blocks import DRAM, NVME, TENANT, Event, Master, die, one_node


def copy(master: Master, slice_rows: int = 1000) -> Columns:
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


def test_a_block_is_live_where_a_node_that_has_it_lives_and_in_all_its_tiers() -> None:
    master, _node = one_node(b"a")
    other = master.register("b")
    master.sync(other, Event(b"a", tiers=NVME), Event(b"b"))
    master.directory.pins.pin(TENANT, [b"a"], pinned=True)
    assert sorted(copy(master).row_masks().tolist()) == [0, LIVE | DRAM, LIVE | DRAM | NVME]
    assert list(copy(master).pins.values()) == [1]
    die(master, other)
    assert sorted(copy(master).row_masks().tolist()) == [0, 0, LIVE | DRAM]


def test_what_changes_between_two_slices_is_told_or_not_and_breaks_nothing() -> None:
    master, node = one_node(*(bytes([n]) for n in range(6)))
    slices = copied(*master.directory.columns(), slice_rows=2)
    next(slices)
    other = master.register("b")
    master.sync(other, *(Event(bytes([n]), tiers=NVME) for n in range(6, 12)))
    master.publish(node, Event(b"\x05", 1, EVENT_GONE))
    *_, columns = slices
    assert columns is not None
    assert len(columns.row_masks()) == len(columns.sizes) == 7
    columns.masks = columns.masks[:1]  # as if the sets of holders had come after they were copied
    assert set(columns.row_masks().tolist()) == {0}
