"""Promises of slab_index.py: blocks are found by their slots, and slabs without any leave nothing behind."""

import numpy as np

from kvstore.store.blocks.block import Block
from kvstore.store.blocks.slab_index import SlabIndex
from kvstore.tiers.slabs import POSITION_BITS
from tests.store.made import made


def slot(slab: int, position: int) -> int:
    """Its index."""
    return slab << POSITION_BITS | position


def block(name: str) -> Block:
    return made("red", name.encode(), 100, 1)


def test_a_block_is_found_by_its_slot_until_it_is_removed() -> None:
    index = SlabIndex()
    first, late, other = block("first"), block("late"), block("other")
    index.add(slot(0, 0), first)
    index.add(slot(0, 5), late)
    index.add(slot(7, 2), other)
    assert index.get(slot(0, 0)) is first
    assert index.get(slot(0, 5)) is late
    assert index.get(slot(7, 2)) is other
    index.check_integrity()
    index.remove(slot(0, 0))
    assert index.get(slot(0, 0)) is None
    assert index.get(slot(0, 5)) is late
    index.check_integrity()


def test_where_no_block_was_there_is_none() -> None:
    index = SlabIndex()
    index.add(slot(0, 1), block("a"))
    assert index.get(slot(0, 0)) is index.get(slot(0, 2)) is index.get(slot(1, 1)) is None


def test_a_slab_without_blocks_leaves_nothing_behind() -> None:
    index = SlabIndex()
    index.add(slot(3, 1000), block("a"))
    index.remove(slot(3, 1000))
    assert not index._slabs
    assert not index._counts
    index.check_integrity()


def test_many_that_lie_in_a_row_are_added_at_once() -> None:
    index = SlabIndex()
    blocks = [block(str(number)) for number in range(6)]
    index.add(slot(2, 9), blocks[0])
    index.add_all(np.array([slot(2, position) for position in range(4, 8)]), blocks[1:5])
    index.add_all(np.array([slot(2, 12)]), blocks[5:])
    index.check_integrity()
    assert [index.get(slot(2, position)) for position in (4, 5, 6, 7, 9, 12)] == [*blocks[1:5], blocks[0], blocks[5]]
    last = (1 << POSITION_BITS) - 1
    index.add_all(np.array([slot(0, last), slot(1, 0)]), blocks[:2])
    index.add_all(np.array([], np.int64), [])
    index.check_integrity()
    assert index.get(slot(0, last)) is blocks[0]
    assert index.get(slot(1, 0)) is blocks[1]


def test_the_blocks_of_a_slab_lie_by_their_places() -> None:
    index = SlabIndex()
    first, second, other = block("a"), block("b"), block("c")
    index.add_all(np.array([slot(2, 0), slot(2, 2), slot(3, 0)]), [first, second, other])
    assert (list(index.mates(slot(2, 0))), index.count(slot(2, 0))) == ([first, None, second], 2)
    index.remove(slot(2, 0))
    assert (list(index.mates(slot(2, 2))), index.count(slot(2, 2))) == ([None, None, second], 1)


def test_many_are_added_as_one_by_one() -> None:
    at_once, each = SlabIndex(), SlabIndex()
    places = [(2, 5), (2, 6), (7, 0), (2, 0), (9, 1000), (7, 3)]
    for index in (at_once, each):
        index.add(slot(2, 1), block("there"))
    blocks = [block(f"{number}") for number in range(len(places))]
    at_once.add_all(np.array([slot(*place) for place in places]), blocks)
    at_once.add_all(np.array([], np.int64), [])
    for place, one in zip(places, blocks, strict=True):
        each.add(slot(*place), one)
    for index in (at_once, each):
        index.check_integrity()
        assert [index.get(slot(*place)) for place in places] == blocks
        assert index.get(slot(2, 4)) is index.get(slot(9, 999)) is None
    assert at_once._counts == each._counts == {2: 4, 7: 2, 9: 1}


def test_many_are_removed_at_once_over_several_slabs() -> None:
    index = SlabIndex()
    slots = [slot(1, 3), slot(1, 4), slot(1, 7), slot(2, 0), slot(2, 1)]
    blocks = [block(str(number)) for number in range(5)]
    index.add_all(np.array(slots), blocks)
    index.remove_all(np.array([slots[4], slots[3], slots[0], slots[1]]))
    index.remove_all(np.array([], np.int64))
    index.check_integrity()
    assert [index.get(each) for each in slots] == [None, None, blocks[2], None, None]
    assert list(index._slabs) == [1]
