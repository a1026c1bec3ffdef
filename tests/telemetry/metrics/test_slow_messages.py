"""Promises of slow_messages.py."""

from kvstore.protocol import control_pb2 as pb
from kvstore.telemetry.metrics.slow_messages import slow_messages
from kvstore.telemetry.metrics.slow_requests import Slow, SlowRequests


def test_messages_have_all_and_the_slowest_comes_first() -> None:
    slowest = SlowRequests()
    slowest.add(Slow("red", "put", 5_000_999, 7.0, "10.0.0.7:1"))
    slowest.add(Slow("blue", "read", 9_000_000, 8.0, ""))
    first, second = slow_messages(slowest, "m1")
    assert (first.tenant, first.duration_us) == ("blue", 9000)
    assert second == pb.SlowRequest(tenant="red", operation="put", duration_us=5000, time_s=7.0, at="m1", peer="10.0.0.7:1")
