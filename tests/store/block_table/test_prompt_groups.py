"""Tests of prompt_groups.py: which blocks of a node are named as one prompt."""

from itertools import pairwise

import pytest

from kvstore.protocol.partitions import PROMPT_BYTES, SHARED_CHILDREN
from kvstore.store.block_table import prompt_groups
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.block_table.prompt_groups import PromptGroups
from kvstore.store.block_table.rows import BlockRows

CHAIN = [b"root", *(b"%d" % number for number in range(50))]


class Blocks:
    """Visible blocks of a node."""

    def __init__(self, partitions: int = 4) -> None:
        self._rows, self._visible = BlockRows(), dict[tuple[str, bytes], Block]()
        partition_map = PartitionMap()
        partition_map.set_count(partitions)
        self.groups = PromptGroups(lambda tenant, key: self._visible.get((tenant, key)), partition_map)

    def add(self, key: bytes, parent: bytes = b"", tenant: str = "red") -> Block:
        block = self._visible[tenant, key] = self._rows.make(tenant, key, 100, 1, "", parent)
        return block

    def chain(self) -> list[Block]:
        return [self.add(CHAIN[0]), *(self.add(key, parent) for parent, key in pairwise(CHAIN))]

    def of(self, *blocks: Block) -> list[bytes]:
        named = self.groups.of(blocks)
        return [named[at : at + PROMPT_BYTES] for at in range(0, len(named), PROMPT_BYTES)]


def test_all_blocks_of_a_prompt_have_one_group() -> None:
    there = Blocks()
    blocks = there.chain()
    assert len(set(there.of(*blocks[::-2], *blocks[1::2]))) == 1, "in any order, and over several commits"
    assert there.of(blocks[7]) != there.of(there.add(b"another")) != there.of(there.add(b"root", tenant="blue"))


def test_with_one_partition_blocks_have_no_group() -> None:
    there = Blocks(partitions=1)
    assert there.of(*there.chain()) == []


def test_children_of_a_shared_prefix_begin_groups() -> None:
    there = Blocks()
    root = there.of(there.add(b"root"))
    children = [there.of(there.add(b"c%d" % number, b"root")) for number in range(SHARED_CHILDREN + 3)]
    first = SHARED_CHILDREN - 1
    assert children[:first] == [root] * first
    assert len({group for [group] in children[first:]} - set(root)) == len(children) - first
    assert there.of(there.add(b"d", b"c6")) == children[6], "as its parent"
    assert there.of(there.add(b"c0", b"root")) == root, "a block that is named again is no further child"


def test_a_block_without_its_parent_is_named_by_it() -> None:
    there = Blocks()
    assert there.of(there.add(b"x", b"gone")) == there.of(there.add(b"y", b"gone"))


def test_a_long_prompt_keeps_its_group_when_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """8,192 blocks are a prompt of 128k tokens."""
    monkeypatch.setattr(prompt_groups, "MAX_KNOWN", 5)
    there = Blocks()
    keys = [b"%d" % number for number in range(8192)]
    blocks = [there.add(key, parent) for key, parent in zip(keys, [b"", *keys[:-1]], strict=True)]
    group = there.of(blocks[0])
    assert there.of(blocks[-1]) == group
    there.of(*(there.add(b"other%d" % number) for number in range(5)))
    assert there.of(there.add(b"next", keys[-1])) == group


def test_a_shared_prefix_in_use_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_groups, "MAX_KNOWN", 2 * SHARED_CHILDREN)
    there = Blocks()
    there.add(b"root")
    prompts = [there.of(there.add(b"c%d" % number, b"root")) for number in range(8 * SHARED_CHILDREN)]
    assert len({group for [group] in prompts}) == len(prompts) - SHARED_CHILDREN + 2
    assert there.of(there.add(b"later", b"c%d" % SHARED_CHILDREN)) == prompts[SHARED_CHILDREN], "as before it was forgotten"


def test_known_blocks_and_walks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_groups, "MAX_KNOWN", 5)
    monkeypatch.setattr(prompt_groups, "MAX_WALK", 10)
    there = Blocks()
    assert len(there.of(there.chain()[-1])) == 1
    assert len(there.groups._known) == 5
    there.add(b"loop", b"loop")
    assert len(there.of(there.add(b"loop", b"loop"))) == 1
