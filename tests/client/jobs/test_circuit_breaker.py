"""Promises of circuit_breaker.py, on a clock of the test's own."""

import pytest

from kvstore.client.jobs.circuit_breaker import BreakerStats, CircuitBreaker, CircuitState
from tests.client.jobs.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(clock: Clock, failures: int = 1) -> CircuitBreaker:
    breaker = CircuitBreaker(failures=failures, probe_interval_s=2.0, clock_ns=clock)
    for _ in range(failures):
        breaker.failed(breaker.epoch)
    assert breaker.state is CircuitState.OPEN
    return breaker


def test_it_opens_after_failures_in_a_row_only(clock: Clock) -> None:
    breaker = CircuitBreaker(failures=3, probe_interval_s=2.0, clock_ns=clock)
    for _ in range(5):
        breaker.failed(breaker.epoch)
        breaker.failed(breaker.epoch)
        breaker.succeeded(breaker.epoch)
    assert breaker.admits()
    for _ in range(3):
        assert breaker.admits()
        breaker.failed(breaker.epoch)
    assert not breaker.admits()
    assert breaker.stats() == BreakerStats(CircuitState.OPEN, opened=1, skipped=1, failures=13)


def test_one_probe_begins_once_it_is_due(clock: Clock) -> None:
    breaker = opened(clock)
    clock.advance(1.999)
    assert not breaker.begin_probe()
    clock.advance(0.001)
    assert breaker.begin_probe()
    assert not breaker.begin_probe()
    assert not breaker.admits()
    assert breaker.stats().state is CircuitState.HALF_OPEN


def test_how_calls_of_an_earlier_epoch_ended_says_nothing(clock: Clock) -> None:
    breaker = CircuitBreaker(failures=1, probe_interval_s=2.0, clock_ns=clock)
    before = breaker.epoch
    breaker.failed(before)
    breaker.succeeded(before)
    assert breaker.state is CircuitState.OPEN
    clock.advance(2)
    assert breaker.begin_probe()
    breaker.succeeded(breaker.epoch)
    breaker.failed(before)
    assert breaker.admits()
    assert breaker.stats().failures == 1
