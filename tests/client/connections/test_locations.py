"""Hints and tier names."""

from kvstore.client.connections.locations import CachedLocation, LocationCache


def hint(node: int) -> CachedLocation:
    return CachedLocation(node, 1, 10)


def test_the_least_recently_used_hint_makes_room() -> None:
    hints = LocationCache(2)
    hints.learn([(b"a", hint(1)), (b"b", hint(2))])
    assert hints.find_one(b"a") == hint(1)
    assert hints.find_one(b"x") is None
    hints.learn([(b"c", hint(3))])
    assert hints.find([b"a", b"b", b"c"]) == [hint(1), None, hint(3)]
