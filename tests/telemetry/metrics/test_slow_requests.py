"""Promises of slow_requests.py."""

from kvstore.protocol.message import MAX_SLOW
from kvstore.telemetry.metrics.slow_requests import MAX_KEPT, MAX_WINDOWS, MIN_SLOW_NS, WINDOW_NS, Slow, SlowRequests

MS = 1_000_000


def of(tenant: str, operation: str, ms: float) -> Slow:
    return Slow(tenant, operation, int(ms * MS), 0.0, "10.0.0.7:1")


def shown(slow: SlowRequests) -> list[tuple[str, str, float]]:
    return [(one.tenant, one.operation, one.duration_ns / MS) for one in slow.slowest()]


def test_slowest_of_each_tenant_and_operation_are_kept() -> None:
    slow = SlowRequests()
    for one in (of("red", "put", 5), of("red", "put", 9), of("red", "put", 7), of("blue", "put", 2), of("red", "read", 3)):
        slow.add(one)
    assert shown(slow) == [("red", "put", 9), ("red", "read", 3), ("blue", "put", 2)]


def test_one_tenant_cannot_crowd_out_others_and_the_floor_rises_when_it_is_full() -> None:
    slow = SlowRequests()
    assert slow.floor_ns == MIN_SLOW_NS
    for number in range(MAX_KEPT):
        slow.add(of(f"t{number}", "put", 10 + number))
    assert slow.floor_ns == 10 * MS
    slow.add(of("other", "put", 9))
    assert len(shown(slow)) == MAX_KEPT
    slow.add(of("other", "put", 11.5))
    assert ("t0", "put", 10) not in shown(slow)
    assert slow.floor_ns == 11 * MS


def test_windows_end_and_are_forgotten() -> None:
    slow, versions = SlowRequests(), []
    slow.run_due(0)
    slow.add(of("red", "put", 5))
    for minute in range(1, MAX_WINDOWS):
        slow.run_due(minute * WINDOW_NS)
        slow.run_due(minute * WINDOW_NS + 1)
        slow.add(of("red", "put", 1 + minute / 100))
        versions.append(slow.version)
    assert shown(slow)[0] == ("red", "put", 5), "a later window does not replace it"
    assert len(shown(slow)) == MAX_WINDOWS
    slow.run_due(MAX_WINDOWS * WINDOW_NS)
    assert slow.version > versions[-1]
    assert ("red", "put", 5) not in shown(slow)


def test_what_is_shown_is_bounded() -> None:
    slow = SlowRequests()
    for minute in range(MAX_WINDOWS):
        slow.run_due(minute * WINDOW_NS)
        for number in range(MAX_KEPT):
            slow.add(of(f"t{number}", "put", 10 + number))
    assert len(slow.slowest()) == MAX_SLOW
