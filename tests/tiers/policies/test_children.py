"""Promises of children.py: a block's children are those that came and have not left, few or many."""

from kvstore.tiers.policies.prefix_tree import FEW_CHILDREN, Children, with_child, without_child


def test_children_come_and_go_few_or_many() -> None:
    children: Children[int] = ()
    for key in range(FEW_CHILDREN + 3):
        children = with_child(children, key)
        assert set(children) == set(range(key + 1))
        assert isinstance(children, set) == (key >= FEW_CHILDREN)
    for key in range(FEW_CHILDREN + 3):
        children = without_child(children, key)
        assert set(children) == set(range(key + 1, FEW_CHILDREN + 3))
    assert children == ()


def test_one_of_few_leaves_the_others() -> None:
    assert without_child((1, 2, 3), 2) == (1, 3)
    assert without_child((1,), 5) == (1,)
