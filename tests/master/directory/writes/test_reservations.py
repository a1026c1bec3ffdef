"""Tests of reservations.py."""

import pytest

from kvstore.master.directory.index.tenants import Tenants
from kvstore.master.directory.limits.quotas import TenantShare
from kvstore.master.directory.writes.reservations import DirectoryReservations
from kvstore.protocol.errors import Full, QuotaExceeded

LIVE = frozenset({1})


def test_generations_are_unique_and_above_all_that_was_seen() -> None:
    reservations, red = DirectoryReservations(ttl_ns=10, last_generation=100, limit=9), Tenants().of("red")
    assert list(reservations.grant(red, [b"a", b"b"], [1, 1], [1, 1], 0)) == [101, 102]
    reservations.saw(500)
    reservations.saw(3)
    assert list(reservations.grant(red, [b"c"], [1], [1], 0)) == [501]
    assert reservations.last_generation == 501
    reservations.check_integrity([red])


def test_reservation_holds_until_expiry_or_node_death() -> None:
    reservations, red = DirectoryReservations(ttl_ns=10, last_generation=0, limit=9), Tenants().of("red")
    reservations.grant(red, [b"a"], [1], [1], 0)
    assert reservations.held(red, b"a", LIVE, 9)
    assert not reservations.held(red, b"a", LIVE, 10)
    assert not reservations.held(red, b"a", frozenset(), 9)
    assert not reservations.held(red, b"b", LIVE, 9)


def test_expired_reservations_are_forgotten_and_later_ones_stay() -> None:
    reservations, red = DirectoryReservations(ttl_ns=10, last_generation=0, limit=9), Tenants().of("red")
    reservations.grant(red, [b"a", b"b"], [1, 1], [1, 1], 0)
    reservations.grant(red, [b"b"], [1], [1], 5)
    reservations.expire([red], 10)
    assert list(red.reserved) == [b"b"]
    reservations.check_integrity([red])
    reservations.expire([red], 15)
    assert not red.reserved


def test_a_reservation_is_ended_only_under_its_own_generation() -> None:
    reservations, red = DirectoryReservations(ttl_ns=10, last_generation=0, limit=9), Tenants().of("red")
    (generation,) = reservations.grant(red, [b"a"], [1], [1], 0)
    reservations.end(red, b"a", generation + 1)
    assert b"a" in red.reserved
    reservations.end(red, b"a", generation)
    reservations.end(red, b"a", generation)
    assert b"a" not in red.reserved


def test_pass_over_ends_earlier_reservations() -> None:
    reservations, red = DirectoryReservations(ttl_ns=10, last_generation=0, limit=3), Tenants().of("red")
    assert list(reservations.pass_over(red, [b"a", b"b"])) == [1, 2]
    reservations.grant(red, [b"a", b"c"], [1, 1], [1, 1], 0)
    with pytest.raises(Full):
        reservations.pass_over(red, [b"a", b"b"])
    assert list(reservations.pass_over(red, [b"a"])) == [5]
    assert list(red.reserved) == [b"c"]
    reservations.check_integrity([red])


def test_reservations_over_the_limit_are_refused_as_a_whole() -> None:
    tenants = Tenants()
    reservations, red, blue = DirectoryReservations(ttl_ns=10, last_generation=0, limit=3), tenants.of("red"), tenants.of("blue")
    reservations.grant(red, [b"a", b"b"], [1, 1], [1, 1], 0)
    with pytest.raises(Full, match=r"2 puts are granted and not published, and 2 more exceed max_reservations \(3\)"):
        reservations.grant(blue, [b"a", b"b"], [1, 1], [1, 1], 0)
    assert (blue.reserved, reservations.last_generation) == ({}, 2)
    reservations.grant(red, [b"b"], [1], [1], 5)
    reservations.check_integrity(tenants)
    reservations.end(red, b"b", 3)
    reservations.expire(tenants, 10)
    reservations.check_integrity(tenants)
    assert len(reservations.grant(blue, [b"a", b"b", b"c"], [1] * 3, [1] * 3, 10)) == 3
    reservations.check_integrity(tenants)


def test_reservations_over_quota_are_refused() -> None:
    tenants = Tenants()
    reservations, red, blue = DirectoryReservations(ttl_ns=10, last_generation=0, limit=9), tenants.of("red"), tenants.of("blue")
    reservations.grant(red, [b"a", b"b"], [1, 1], [1, 1], 0, share=TenantShare(2, 2))
    with pytest.raises(QuotaExceeded, match=r"tenant 'red' has 2 puts granted and not published; 1 more exceed its quota of 2 \(reserva"):
        reservations.grant(red, [b"b", b"c"], [1, 1], [1, 1], 0, share=TenantShare(2, 2))
    assert sorted(red.reserved) == [b"a", b"b"]
    reservations.grant(red, [b"b"], [1], [1], 0, share=TenantShare(2, 2))
    reservations.grant(blue, [b"a", b"b"], [1, 1], [1, 1], 0, share=TenantShare(2, 2))
    reservations.check_integrity(tenants)
