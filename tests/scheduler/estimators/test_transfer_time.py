"""A transfer takes its bytes and those before it over what the sender's rails deliver."""

import pytest

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.interface import BandwidthTransfer


def test_bytes_wait_for_those_before_them() -> None:
    assert BandwidthTransfer().transfer_s(200, backlog_bytes=300, bytes_per_s=100) == 5
    assert BandwidthTransfer(latency_s=0.5).transfer_s(200, backlog_bytes=300, bytes_per_s=100) == 5.5


def test_nothing_is_sent_at_once_whatever_waits() -> None:
    assert BandwidthTransfer(latency_s=0.5).transfer_s(0, backlog_bytes=300, bytes_per_s=0) == 0


def test_what_was_measured_between_two_counts_for_what_goes_between_them() -> None:
    """What waits before it goes elsewhere, at the sender's own rate."""
    assert BandwidthTransfer(latency_s=0.5).transfer_s(200, backlog_bytes=300, bytes_per_s=100, measured_bytes_per_s=50) == 7.5
    assert BandwidthTransfer().transfer_s(1, backlog_bytes=0, bytes_per_s=100, measured_bytes_per_s=0) == float("inf")


def test_a_sender_that_sends_nothing_never_arrives() -> None:
    assert BandwidthTransfer().transfer_s(1, backlog_bytes=0, bytes_per_s=0) == float("inf")


@pytest.mark.parametrize("latency_s", [-1e-9, float("nan")])
def test_a_negative_latency_is_misuse(latency_s: float) -> None:
    with pytest.raises(InvalidArgument, match="latency_s"):
        BandwidthTransfer(latency_s=latency_s)
