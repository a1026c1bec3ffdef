"""Promises of run.py: a run gives those of its blocks that are there, in order, and keeps no more than twice as many keys."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.policies.interface import DictStates
from kvstore.tiers.policies.visits import Run


@given(st.integers(1, 30), st.data())
def test_those_that_are_there_are_given_in_order(count: int, data: st.DataObject) -> None:
    nodes = DictStates[int, object]()
    run = Run(list(range(count)), "home", nodes)
    nodes.set_all(range(count), run)
    left = list(range(count))
    while left:
        assert (run.first(), list(run), run.left) == (left[0], left, len(left))
        gone = data.draw(st.sets(st.sampled_from(left), min_size=1))
        for key in gone:
            if data.draw(st.booleans()):
                del nodes[key]
            else:
                nodes[key] = "another one's"
            left.remove(key)
        run.has_lost(len(gone))
        assert len(run._keys) <= max(2 * len(left), 1)
    assert (list(run), run.left, run.home) == ([], 0, "home")


def test_more_come_as_long_as_all_are_there() -> None:
    nodes = DictStates[int, object]()
    run = Run([1, 2], "home", nodes)
    run.extend((3,))
    nodes.set_all((1, 2, 3), run)
    assert (list(run), run.left, run.is_whole) == ([1, 2, 3], 3, True)
    del nodes[2]
    run.has_lost(1)
    assert (list(run), run.is_whole) == ([1, 3], False)
