"""Hints and tier names."""

from kvstore.client.locations import Hint, Hints, tier_names


def hint(node: int) -> Hint:
    return Hint(node, 1, 10)


def test_hints_are_found_until_forgotten() -> None:
    hints = Hints(10)
    hints.learn([(b"a", hint(1)), (b"b", hint(2))])
    assert hints.find([b"a", b"x", b"b"]) == [hint(1), None, hint(2)]
    hints.forget([b"a", b"x"])
    assert hints.find([b"a"]) == [None]
    assert len(hints) == 1


def test_the_least_recently_used_hint_makes_room() -> None:
    hints = Hints(2)
    hints.learn([(b"a", hint(1)), (b"b", hint(2))])
    assert hints.find_one(b"a") == hint(1)
    assert hints.find_one(b"x") is None
    hints.learn([(b"c", hint(3))])
    assert hints.find([b"a", b"b", b"c"]) == [hint(1), None, hint(3)]


def test_a_newer_hint_replaces_the_older() -> None:
    hints = Hints(2)
    hints.learn([(b"a", hint(1)), (b"b", hint(2)), (b"a", hint(3)), (b"c", hint(4))])
    assert hints.find([b"a", b"b"]) == [hint(3), None]


def test_one_key_gets_its_hint_as_any_does() -> None:
    hints = Hints(2)
    for key, node in ((b"a", 1), (b"b", 2), (b"a", 3)):
        hints.learn_one(key, hint(node))
    assert not hints.has_dropped
    hints.learn_one(b"c", hint(4))
    assert hints.has_dropped
    assert hints.find([b"a", b"b", b"c"]) == [hint(3), None, hint(4)]


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


def test_a_capacity_of_zero_remembers_nothing() -> None:
    hints = Hints(0)
    hints.learn([(b"a", hint(1))])
    assert hints.find([b"a"]) == [None]


def test_tiers_are_named_fastest_first() -> None:
    assert tier_names(7) == ("hbm", "dram", "nvme")
    assert tier_names(4) == ("nvme",)
    assert tier_names(0) == ()
