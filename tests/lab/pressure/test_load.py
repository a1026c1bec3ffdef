"""Promises of load.py."""

from random import Random
from typing import Any

import pytest

from kvstore.lab.pressure.load import MAX_USERS, Generation, UserLoad, Users
from kvstore.protocol.errors import InvalidArgument

LOAD = UserLoad(users=3, context_tokens=1000, output_tokens=100, think_s=5.0, duration_s=200.0)


def all_of(users: Users, *, answer_s: float) -> list[Generation]:
    """Everyone is answered after so long."""
    found = []
    while users.next_s is not None:
        request = users.take()
        found.append(request)
        users.finish(request.user, now_s=request.arrival_s + answer_s)
    return found


def sizes(requests: list[Generation], user: int) -> list[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in requests if request.user == user]


def test_load_requests_are_ordered_within_duration() -> None:
    found = all_of(Users(LOAD, Random(1)), answer_s=1.0)
    assert [request.number for request in found] == list(range(len(found)))
    times = [request.arrival_s for request in found]
    assert times == sorted(times)
    assert times[-1] < LOAD.duration_s
    assert {request.user for request in found} == {0, 1, 2}
    assert all(750 <= request.prompt_tokens <= 1250 and 75 <= request.output_tokens <= 125 for request in found)
    assert 70 < len(found) < 150  # 3 users, 6 s a round


def test_a_user_has_one_request_under_way_at_most() -> None:
    users = Users(LOAD, Random(1))
    asked = []
    while users.next_s is not None:
        asked.append(users.take().user)
    assert sorted(asked) == [0, 1, 2]
    assert users.sent == 3


def test_what_a_user_asks_does_not_depend_on_the_answers() -> None:
    quick, slow = all_of(Users(LOAD, Random(4)), answer_s=0.5), all_of(Users(LOAD, Random(4)), answer_s=20.0)
    for user in range(3):
        common = len(sizes(slow, user))
        assert 0 < common < len(sizes(quick, user))
        assert sizes(quick, user)[:common] == sizes(slow, user)


def test_load_without_spread_is_uniform() -> None:
    found = all_of(Users(UserLoad(users=2, context_tokens=7, output_tokens=1, spread=0, duration_s=60), Random(2)), answer_s=1.0)
    assert {(request.prompt_tokens, request.output_tokens) for request in found} == {(7, 1)}
    tiny = all_of(Users(UserLoad(users=2, context_tokens=1, output_tokens=1, spread=0.9, duration_s=60), Random(2)), answer_s=1.0)
    assert min(request.prompt_tokens for request in tiny) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"users": 0}, "users is 0: it must be from 1 to 10,000"),
        ({"users": MAX_USERS + 1}, "users is 10001"),
        ({"context_tokens": 0}, "context_tokens is 0"),
        ({"output_tokens": -1}, "output_tokens is -1"),
        ({"spread": 1.0}, "spread is 1: it must be 0 or more and below 1"),
        ({"spread": -0.1}, "spread is -0.1"),
        ({"think_s": 0.0}, "think_s is 0: it must be above 0 and at most 86400 seconds"),
        ({"duration_s": float("inf")}, "duration_s is inf"),
        ({"duration_s": float("nan")}, "duration_s is nan"),
    ],
)
def test_figures_that_cannot_be_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        UserLoad(**{"users": 1, "context_tokens": 1, "output_tokens": 1, **changed})
