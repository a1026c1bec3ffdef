"""Hints and tier names."""

from kvstore.client.connections.locations import Hint, Hints


def hint(node: int) -> Hint:
    return Hint(node, 1, 10)


def test_the_least_recently_used_hint_makes_room() -> None:
    hints = Hints(2)
    hints.learn([(b"a", hint(1)), (b"b", hint(2))])
    assert hints.find_one(b"a") == hint(1)
    assert hints.find_one(b"x") is None
    hints.learn([(b"c", hint(3))])
    assert hints.find([b"a", b"b", b"c"]) == [hint(1), None, hint(3)]


def test_many_keys_get_one_hint_as_if_they_came_one_by_one() -> None:
    hints = Hints(3)
    hints.learn([(b"a", hint(1)), (b"b", hint(1)), (b"c", hint(1))])
    hints.learn_all([b"a", b"d"], hint(2))
    assert hints.find([b"a", b"b", b"c", b"d"]) == [hint(2), None, hint(1), hint(2)]
    assert hints.has_dropped


def test_a_few_more_than_have_to_go_make_room_the_longest_unused_first() -> None:
    hints, keys = Hints(64), [b"%d" % number for number in range(65)]
    hints.learn_all(keys[:64], hint(1))
    assert len(hints) == 64
    assert not hints.has_dropped
    assert hints.find_one(keys[0]) == hint(1)
    hints.learn_all(keys[64:], hint(2))
    assert len(hints) == 60
    assert hints.has_dropped
    assert hints.find([*keys[:7], keys[0]]) == [hint(1), *[None] * 5, hint(1), hint(1)], "what was used stays"
    assert len(hints) == 60
