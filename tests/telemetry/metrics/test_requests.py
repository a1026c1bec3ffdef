"""Promises of requests.py."""

from kvstore.protocol.errors import Full, KVStoreError
from kvstore.protocol.master_messages import Lookup, MatchPrefix
from kvstore.protocol.session_messages import Ok
from kvstore.telemetry.metrics.requests import KEPT_TURNS, OPERATIONS, Requests, in_words
from kvstore.telemetry.metrics.slow_requests import MIN_SLOW_NS, Slow


def test_operations_are_named_by_their_messages() -> None:
    assert OPERATIONS[MatchPrefix.TYPE] == "match_prefix"
    assert Ok.TYPE not in OPERATIONS
    assert in_words("KVStoreError") == "kvstore_error"


def test_answers_are_counted_by_operation_and_refusals_by_reason() -> None:
    requests = Requests()
    for _ in range(2):
        requests.answered[MatchPrefix.TYPE](1000)
    requests.answered[250](1000)  # nothing that anybody can ask
    requests.refused(Full("no room"))
    requests.refused(Full("no room"))
    requests.refused(KVStoreError("internal"))
    assert {name: sum(counts.counts) for name, counts in requests.durations().items()} == {("match_prefix",): 2}
    assert requests.refusals() == {("full",): 2, ("kvstore_error",): 1}


def test_the_status_is_told_how_many_how_long_and_the_slowest_of_the_last_turns() -> None:
    requests = Requests()
    for elapsed_ns in (2_000_000, 9_000_000, 1_000_000):
        requests.answered[MatchPrefix.TYPE](elapsed_ns)
    told = {"request_match_prefix_count": 3, "request_match_prefix_us": 12_000, "request_match_prefix_slowest_us": 9_000}
    assert requests.told() == told
    for _ in range(KEPT_TURNS - 1):
        requests.turn()
    requests.answered[MatchPrefix.TYPE](3_000_000)
    assert requests.told()["request_match_prefix_slowest_us"] == 9_000
    requests.turn()
    assert requests.told()["request_match_prefix_slowest_us"] == 3_000


class Red:
    """A peer."""

    class context:  # noqa: N801
        tenant = "red"

    def peer(self) -> str:
        return "10.0.0.7:5"


def test_slow_requests_are_kept_by_tenant_and_the_floor_follows() -> None:
    requests = Requests(wall_s=lambda: 7.0)
    assert requests.slow_ns == MIN_SLOW_NS
    requests.slow(Red(), Lookup.TYPE, 5_000_000)
    requests.slow(Red(), Ok.TYPE, 9_000_000)
    assert requests.slowest.slowest() == [Slow("red", "lookup", 5_000_000, 7.0, "10.0.0.7:5")]
    requests.slowest.floor_ns = 3
    requests.turn()
    assert requests.slow_ns == requests.slowest.floor_ns == MIN_SLOW_NS, "a window begins"
