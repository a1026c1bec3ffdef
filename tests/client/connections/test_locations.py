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
