"""Promises of rates.py."""

import pytest

from kvstore.console.rates import Rates


def test_a_rate_is_what_a_counter_grew_by_from_heartbeat_to_heartbeat() -> None:
    rates = Rates()
    assert rates.of("a", at_s=10.0, epoch=1, counters={"hits": 100}) == {}
    assert rates.of("a", at_s=12.0, epoch=1, counters={"hits": 160, "new": 4}) == {"hits": 30, "new": 2}
    assert rates.of("a", at_s=12.001, epoch=1, counters={"hits": 160, "new": 4}) == {"hits": 30, "new": 2}, "the same heartbeat"
    assert rates.of("a", at_s=12.2, epoch=1, counters={"hits": 160, "new": 4}) == {"hits": 30, "new": 2}, "the same, told slowly"
    assert rates.of("a", at_s=13.0, epoch=1, counters={"hits": 160, "new": 4}) == {"hits": 0, "new": 0}
    assert rates.of("a", at_s=13.1, epoch=1, counters={"hits": 161, "new": 4}) == {"hits": pytest.approx(10), "new": 0}


def test_a_counter_that_fell_began_again_and_a_new_registration_is_not_compared() -> None:
    rates = Rates()
    rates.of("a", at_s=1, epoch=1, counters={"hits": 100})
    assert rates.of("a", at_s=2, epoch=1, counters={"hits": 7}) == {"hits": 7}
    assert rates.of("a", at_s=3, epoch=2, counters={"hits": 50}) == {}


def test_who_is_gone_is_forgotten() -> None:
    rates = Rates()
    rates.of("a", at_s=1, epoch=1, counters={"hits": 1})
    rates.of("b", at_s=1, epoch=1, counters={"hits": 1})
    rates.keep(["b", "c"])
    assert rates.of("a", at_s=2, epoch=1, counters={"hits": 5}) == {}
    assert rates.of("b", at_s=2, epoch=1, counters={"hits": 5}) == {"hits": 4}
