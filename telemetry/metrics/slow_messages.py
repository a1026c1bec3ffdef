"""Slow requests as messages of the control plane."""

from kvstore.protocol import control_pb2 as pb
from kvstore.telemetry.metrics.slow_requests import SlowRequests


def slow_messages(slowest: SlowRequests, at: str = "") -> list[pb.SlowRequest]:
    """The slowest first. `at` names the daemon; "" where the receiver knows it."""
    return [
        pb.SlowRequest(
            tenant=one.tenant, operation=one.operation, duration_us=one.duration_ns // 1000, time_s=one.time_s, at=at, peer=one.peer
        )
        for one in slowest.slowest()
    ]
