"""Promises of node.py: a block's children are those that came and have not gone, and one that was alone has had a visit by itself."""

import pytest

from kvstore.tiers.policies.prefix_tree import FEW_CHILDREN, Node, alone, is_alone, with_child
from kvstore.tiers.policies.visits import ALONE, Cohort, Visit


def parent_of(children: list[int]) -> Node[int]:
    node: Node[int] = Node(None, Visit(), 1, 0)
    node.adopt(tuple(children[:1]))
    for key in children[1:]:
        node.siblings = with_child(node.siblings, key)
    return node


@pytest.mark.parametrize("count", [2, FEW_CHILDREN + 1, FEW_CHILDREN + 5])
@pytest.mark.parametrize("order", [1, -1], ids=["oldest first", "newest first"])
def test_one_child_after_the_other_goes(count: int, order: int) -> None:
    node, left = parent_of(list(range(count))), list(range(count))
    for key in list(range(count))[::order][: count - 1]:
        node.lose_child(key)
        left.remove(key)
        assert sorted(node.children) == left
        assert node.child in left
    assert node.siblings in ((), set())


def test_few_children_are_told_in_their_order_and_many_can_be_changed_as_they_are() -> None:
    assert parent_of([3, 1, 2]).children == (3, 1, 2)
    assert parent_of(list(range(20))).children == set(range(20))
    many: Node[int] = Node(None, Visit(), 1, 0)
    many.adopt(set(range(9)))
    assert many.children == set(range(9))


def test_a_block_that_was_alone_had_a_first_visit_that_has_ended() -> None:
    cohort: Cohort[int] = Cohort(ALONE, 5.0)
    node = alone(7, cohort)
    assert (node.visit.cohort, node.visit.tip, node.visit.blocks, node.visit.classify()) == (cohort, 7, 1, ALONE)
    assert (node.parent, node.child, node.home) == (None, None, None)


def test_a_block_is_alone_that_has_nothing_but_its_first_visit() -> None:
    cohort = Cohort[int](3, 1.5)
    assert is_alone(alone(7, cohort))
    for name, value in (("birth_turn", 2), ("forks", 1), ("parent", 6)):
        node = alone(7, cohort)
        setattr(node, name, value)
        assert not is_alone(node)
    for name, value in (("blocks", 2), ("new_blocks", 0), ("turn", 2), ("forks", 4)):
        node = alone(7, cohort)
        setattr(node.visit, name, value)
        assert not is_alone(node)
