"""Promises of cached.py."""

import pytest

from kvstore.console.cached import MAX_KEPT, Cached
from kvstore.protocol.errors import Unavailable
from tests.console.serving import Clock


def test_an_answer_is_asked_for_again_when_it_is_old() -> None:
    clock, asked = Clock(), list[int]()

    def ask() -> int:
        asked.append(1)
        return len(asked)

    cached = Cached(5, clock=clock)
    assert [cached.get("a", ask), cached.get("a", ask), cached.get("b", ask)] == [1, 1, 2]
    clock.now_s += 5
    assert cached.get("a", ask) == 3


def test_an_error_is_not_kept_and_old_keys_go() -> None:
    cached = Cached(5)

    def fail() -> int:
        raise Unavailable("not now")

    with pytest.raises(Unavailable):
        cached.get("a", fail)
    assert cached.get("a", lambda: 1) == 1
    for key in range(MAX_KEPT):
        cached.get(key, lambda: 0)
    assert cached.get("a", lambda: 2) == 2
