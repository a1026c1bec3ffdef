"""Promises of requests.py."""

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Full, KVStoreError
from kvstore.protocol.master_messages import Lookup, MatchPrefix
from kvstore.protocol.session_messages import Ok
from kvstore.telemetry.metrics.requests import (
    KEPT_ROTATIONS,
    MAX_KEPT,
    MAX_WINDOWS,
    MIN_SLOW_NS,
    WINDOW_NS,
    RequestMetrics,
    SlowRequest,
    SlowRequests,
    slow_messages,
)

MS = 1_000_000


def test_answers_are_counted_by_operation_and_refusals_by_reason() -> None:
    requests = RequestMetrics()
    for _ in range(2):
        requests.answered[MatchPrefix.TYPE](1000)
    requests.answered[250](1000)  # nothing that anybody can ask
    requests.refused(Full("no room"))
    requests.refused(Full("no room"))
    requests.refused(KVStoreError("internal"))
    assert {name: sum(counts.counts) for name, counts in requests.durations().items()} == {("match_prefix",): 2}
    assert requests.refusals() == {("full",): 2, ("kvstore_error",): 1}


def test_counters_have_count_sum_and_slowest() -> None:
    requests = RequestMetrics()
    for elapsed_ns in (2_000_000, 9_000_000, 1_000_000):
        requests.answered[MatchPrefix.TYPE](elapsed_ns)
    told = {"request_match_prefix_count": 3, "request_match_prefix_us": 12_000, "request_match_prefix_slowest_us": 9_000}
    assert requests.counters() == told
    for _ in range(KEPT_ROTATIONS - 1):
        requests.rotate()
    requests.answered[MatchPrefix.TYPE](3_000_000)
    assert requests.counters()["request_match_prefix_slowest_us"] == 9_000
    requests.rotate()
    assert requests.counters()["request_match_prefix_slowest_us"] == 3_000


class Red:
    """A peer."""

    class context:  # noqa: N801
        tenant = "red"

    def peer(self) -> str:
        return "10.0.0.7:5"


def test_slow_requests_are_kept_by_tenant_and_the_floor_follows() -> None:
    requests = RequestMetrics(wall_s=lambda: 7.0)
    assert requests.slow_ns == MIN_SLOW_NS
    requests.slow(Red(), Lookup.TYPE, 5_000_000)
    requests.slow(Red(), Ok.TYPE, 9_000_000)
    assert requests.slowest.slowest() == [SlowRequest("red", "lookup", 5_000_000, 7.0, "10.0.0.7:5")]
    requests.slowest.floor_ns = 3
    requests.rotate()
    assert requests.slow_ns == requests.slowest.floor_ns == MIN_SLOW_NS, "a window begins"


def of(tenant: str, operation: str, ms: float) -> SlowRequest:
    return SlowRequest(tenant, operation, int(ms * MS), 0.0, "10.0.0.7:1")


def shown(slow: SlowRequests) -> list[tuple[str, str, float]]:
    return [(one.tenant, one.operation, one.duration_ns / MS) for one in slow.slowest()]


def test_slowest_of_each_tenant_and_operation_are_kept() -> None:
    slow = SlowRequests()
    for one in (of("red", "put", 5), of("red", "put", 9), of("red", "put", 7), of("blue", "put", 2), of("red", "read", 3)):
        slow.add(one)
    assert shown(slow) == [("red", "put", 9), ("red", "read", 3), ("blue", "put", 2)]


def test_slow_requests_keep_one_per_tenant() -> None:
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


def test_messages_have_all_and_the_slowest_comes_first() -> None:
    slowest = SlowRequests()
    slowest.add(SlowRequest("red", "put", 5_000_999, 7.0, "10.0.0.7:1"))
    slowest.add(SlowRequest("blue", "read", 9_000_000, 8.0, ""))
    first, second = slow_messages(slowest, "m1")
    assert (first.tenant, first.duration_us) == ("blue", 9000)
    assert second == pb.SlowRequest(tenant="red", operation="put", duration_us=5000, time_s=7.0, at="m1", peer="10.0.0.7:1")
