"""Tests of holders.py."""

from kvstore.master.directory.index.holders import (
    ABSENT,
    CONFIRMED,
    HINT,
    HINTED,
    MAX_REPLICAS,
    HolderSets,
)


def test_equal_sets_share_one_index_until_their_last_row_leaves() -> None:
    sets = HolderSets()
    one, two = sets.enter(((1, 2),)), sets.enter(((1, 2),))
    assert one == two
    sets.leave(one)
    assert sets[one] == ((1, 2),)
    sets.leave(two)
    sets.check_integrity([])
    assert sets.enter(((3, 2),)) == one


def test_a_set_is_live_while_one_of_its_nodes_is() -> None:
    sets = HolderSets()
    both, second = sets.enter(((1, 2), (2, 4 | HINT))), sets.enter(((2, 2),))
    sets.set_live([1])
    assert (sets.live[both], sets.live[second]) == (1, 0)
    assert sets.readable_at(both) == [1]
    sets.set_live([1, 2])
    assert sets.readable_at(both) == [1, 2]
    assert sets.tiers[both] == b"\x02\x04"
    assert sets.live_blocks() == 2
    assert (sets.blocks_at(1), sets.blocks_at(2), sets.blocks_at(3)) == (1, 2, 0)
    assert (set(sets.sets_of(1)), set(sets.sets_of(2)), set(sets.sets_of(3))) == ({both}, {both, second}, set())
    sets.check_integrity([both, second])


def test_of_more_nodes_than_an_answer_names_all_are_known() -> None:
    sets = HolderSets()
    index = sets.enter(tuple((node_id, 2) for node_id in range(1, MAX_REPLICAS + 10)))
    sets.set_live(range(5, MAX_REPLICAS + 10))
    assert sets.readable_at(index) == [*range(5, MAX_REPLICAS + 10)]
    assert (sets.replicas[index], len(sets.tiers[index])) == (MAX_REPLICAS, MAX_REPLICAS)
    sets.check_integrity([index])


def test_a_set_is_named_while_a_live_node_of_it_is_no_hint() -> None:
    sets = HolderSets()
    both, hint = sets.enter(((1, 2), (2, 4 | HINT))), sets.enter(((2, 2 | HINT),))
    for live, presence in (((), (ABSENT, ABSENT)), ((1,), (CONFIRMED, ABSENT)), ((2,), (HINTED, HINTED)), ((1, 2), (CONFIRMED, HINTED))):
        sets.set_live(live)
        assert (sets.presence[both], sets.presence[hint]) == presence
        sets.check_integrity([both, hint])
    sets.rewrite(2, lambda state: state & ~HINT)
    assert (sets.presence[0], sets.presence[hint]) == (ABSENT, CONFIRMED)


def test_a_rewrite_changes_all_rows_of_a_node_at_once() -> None:
    sets = HolderSets()
    sets.set_live([1, 2])
    first, both = sets.enter(((1, 2),)), sets.enter(((1, 2), (2, 2)))
    sets.rewrite(1, lambda state: state | HINT)
    assert sets[both] == ((1, 2 | HINT), (2, 2))
    sets.rewrite(1, lambda state: state)
    sets.rewrite(1, lambda _state: None)
    assert sets[both] == ((2, 2),)
    assert sets.empty == {first}
    assert not sets.live[first]
    sets.check_integrity([first, both])
    sets.leave(first)
    assert not sets.empty


def test_sets_made_equal_by_a_rewrite_drain_apart() -> None:
    sets = HolderSets()
    hint, plain = sets.enter(((1, 2 | HINT),)), sets.enter(((1, 2),))
    sets.rewrite(1, lambda state: state | HINT)
    sets.check_integrity([hint, plain])
    assert sets.enter(((1, 2 | HINT),)) == hint
    sets.leave(plain)
    sets.check_integrity([hint, hint])
    sets.rewrite(1, lambda _state: None)
    sets.leave(hint)
    sets.leave(hint)
    sets.check_integrity([])


def test_an_equal_set_that_lost_its_name_is_rewritten_too() -> None:
    sets = HolderSets()
    named, unnamed = sets.enter(((1, 2 | HINT),)), sets.enter(((1, 2),))
    sets.rewrite(1, lambda state: state | HINT)
    sets.rewrite(1, lambda _state: None)
    assert sets.empty == {named, unnamed}
    sets.check_integrity([named, unnamed])


def test_only_at_returns_sets_without_other_holders() -> None:
    sets = HolderSets()
    sets.set_live([1, 2, 3])
    first, both, other = sets.enter(((1, 2),), 5), sets.enter(((1, 2), (2, 2))), sets.enter(((1, 2), (3, 2)))
    assert sets.only_at([1]) == {first: 5}
    assert sets.only_at([1, 2]) == {first: 5, both: 1}
    hinted = sets.enter(((1, 2), (3, HINT | 2)))
    assert sets.only_at([1, 2]) == {first: 5, both: 1}
    assert sets.only_at([1, 2], surely=False) == {first: 5, both: 1, hinted: 1}, "the third has yet to say that it has it"
    sets.leave(hinted)
    sets.set_live([1, 2])
    assert sets.only_at([1, 2]) == {first: 5, both: 1, other: 1}, "the third is dead"
    sets.set_live([])
    assert sets.only_at([1, 2]) == {}
