"""Leases of Mooncake's API: one hold for what is found at about the same time, and what get sessions hold until their end."""

from kvstore.client.holds import new_hold
from kvstore.engines.mooncake.leases import RENEW_NS, WINDOWS, GetSessions, LookupLease

S = 10**9


def test_lookups_of_a_part_of_the_lease_share_a_hold() -> None:
    lease = LookupLease(WINDOWS)
    first = lease.hold(5 * S)
    assert first is not None
    assert first.duration_ms == WINDOWS * 1000
    assert lease.hold(6 * S - 1) is first
    second = lease.hold(6 * S)
    assert second is not None
    assert second.number != first.number


def test_without_a_lease_there_is_no_hold() -> None:
    assert LookupLease(0).hold(0) is None


def test_a_hold_is_released_with_the_last_of_its_sessions() -> None:
    sessions, first, second = GetSessions(), new_hold(1), new_hold(1)
    sessions.begin(first, ["a", "b"], 0)
    assert ("a" in sessions, "x" in sessions) == (True, False)
    assert sessions.end(["a", "x"]) == []
    sessions.begin(second, ["a"], 0)
    assert sessions.end(["a", "b"]) == [second, first]
    assert sessions.end(["a"]) == []


def test_sessions_that_last_are_held_on() -> None:
    sessions, first, second = GetSessions(), new_hold(1), new_hold(1)
    sessions.begin(first, ["b", "a"], 0)
    sessions.begin(second, ["c"], 1)
    assert sessions.due(["a", "b", "c", "x"], RENEW_NS - 1) == []
    assert sessions.due(["a", "b", "c", "x"], RENEW_NS) == [(first, ["a", "b"])]
    assert sessions.due(["a", "c"], RENEW_NS + 1) == [(second, ["c"])]
    assert sessions.due(["a"], 2 * RENEW_NS) == [(first, ["a", "b"])]
