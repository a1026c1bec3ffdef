"""Promises of holders.py."""

from kvstore.master.directory.index.holders import (
    HINT,
    HINTED,
    MAX_REPLICAS,
    NAMED,
    NOBODY,
    HolderSets,
    has_holder,
    with_holder,
    without_holder,
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


def test_nobodys_set_is_index_0_and_never_counted() -> None:
    sets = HolderSets()
    assert sets.enter(()) == 0
    sets.leave(0)
    sets.check_integrity([0, 0])
    assert not sets.live[0]


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
    for live, standing in (((), (NOBODY, NOBODY)), ((1,), (NAMED, NOBODY)), ((2,), (HINTED, HINTED)), ((1, 2), (NAMED, HINTED))):
        sets.set_live(live)
        assert (sets.standing[both], sets.standing[hint]) == standing
        sets.check_integrity([both, hint])
    sets.rewrite(2, lambda state: state & ~HINT)
    assert (sets.standing[0], sets.standing[hint]) == (NOBODY, NAMED)


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


def test_all_nodes_of_all_sets_are_told() -> None:
    sets = HolderSets()
    sets.enter(((1, 2), (7, 2)))
    sets.leave(sets.enter(((9, 2),)))
    assert sets.node_ids() == {1, 7}
    assert sets.held_blocks() == 1
    sets.rewrite(1, lambda _state: None)
    assert sets.held_blocks() == 1
    sets.rewrite(7, lambda _state: None)
    assert sets.held_blocks() == 0, "nobody holds it any more; its row waits for a sweep"


def test_pairs_are_kept_by_node() -> None:
    assert with_holder(((3, 1),), 2, 4) == ((2, 4), (3, 1))
    assert with_holder(((2, 1),), 2, 4) == ((2, 4),)
    assert without_holder(((2, 1), (3, 1)), 2) == ((3, 1),)


def test_sets_of_some_nodes_alone_are_those_that_nobody_else_can_be_asked_for() -> None:
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


def test_the_mask_of_a_set_has_a_bit_for_each_node_that_lives() -> None:
    sets = HolderSets()
    index = sets.enter(((1, 0), (3, 0), (5, 0)))
    sets.set_live([1, 5, 7])
    assert sets.mask(index) == 0b100010
    assert sets.mask(0) == 0


def test_the_sets_are_told_that_a_node_has_yet_to_name_the_blocks_of() -> None:
    sets = HolderSets()
    hint, named, other = sets.enter(((1, 2 | HINT), (2, 2))), sets.enter(((1, 2), (2, 2 | HINT))), sets.enter(((2, HINT),))
    assert (sets.hinted_at(1), sorted(sets.hinted_at(2)), sets.hinted_at(3)) == ([hint], [named, other], [])
    assert len(sets) == 4


def test_a_holder_is_found_by_its_id_in_whatever_state() -> None:
    pairs = ((1, 2 | HINT), (3, 4))
    assert [has_holder(pairs, node_id) for node_id in (1, 2, 3)] == [True, False, True]
