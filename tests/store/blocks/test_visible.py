"""Promises of visible.py: one block a key, counted right, and what is known twice is kept once."""

from kvstore.store.blocks.block import Block
from kvstore.store.blocks.rows import rows_of
from kvstore.store.blocks.visible import VisibleBlocks
from tests.store.made import made


def block(key: bytes, *, tenant: str = "red", parent: bytes = b"") -> Block:
    return made(tenant, key, 100, 1, parent=parent)


def test_blocks_are_found_by_tenant_and_key_until_they_are_removed() -> None:
    visible, first, second, other = VisibleBlocks(), block(b"a"), block(b"b"), block(b"a", tenant="blue")
    visible.add(first)
    visible.add_all([second], rows_of([second]))
    visible.add(other)
    assert (visible.find("red", b"a"), visible.find("red", b"b"), visible.find("blue", b"a")) == (first, second, other)
    assert visible.find("blue", b"b") is visible.find("green", b"a") is None
    assert (len(visible), list(visible), visible.of_tenant("red")) == (3, [first, second, other], [first, second])
    assert dict(visible.by_key("blue")) == {b"a": other}
    assert visible.has_any("red", [b"x", b"b"])
    assert not visible.has_any("red", [b"x"])
    assert not visible.has_any("green", [b"a"])
    visible.remove(other)
    assert (visible.find("blue", b"a"), visible.of_tenant("blue"), len(visible)) == (None, [], 2)
    visible.check_integrity()
    visible.remove_all([second, first])
    assert (visible.find("red", b"a"), visible.tenants(), len(visible)) == (None, set(), 0)
    visible.check_integrity()


def test_each_access_is_later_than_the_one_before_and_to_be_added_is_one() -> None:
    visible, blocks = VisibleBlocks(), [block(name) for name in (b"a", b"b", b"c")]
    visible.add(blocks[0])
    visible.add_all(blocks[1:], rows_of(blocks[1:]))
    visible.access(blocks[0])
    assert sorted(blocks, key=lambda block: block.last_access) == [blocks[1], blocks[2], blocks[0]]
    assert len({block.last_access for block in blocks}) == 3


def test_parent_and_child_share_the_bytes_of_the_parents_key() -> None:
    for add in (VisibleBlocks.add, lambda visible, below: VisibleBlocks.add_all(visible, [below], rows_of([below]))):
        visible, above = VisibleBlocks(), block(b"above")
        below = block(b"below", parent=bytes(bytearray(b"above")))
        visible.add(above)
        add(visible, below)
        assert below.parent is above.key
