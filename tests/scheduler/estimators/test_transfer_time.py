"""A transfer takes its bytes and those before it over what the sender's rails deliver."""

import pytest

from kvstore.scheduler.estimators.interface import BandwidthTransfer


@pytest.mark.parametrize(
    ("size_bytes", "backlog_bytes", "bytes_per_s", "measured", "expected_s"),
    [
        pytest.param(200, 300, 100, None, 5, id="bytes wait for those before them"),
        pytest.param(0, 300, 0, None, 0, id="nothing is sent at once"),
        pytest.param(200, 300, 100, 50, 7, id="what waits goes elsewhere, at the sender's rate"),
        pytest.param(1, 0, 100, 0, float("inf"), id="nothing arrives"),
        pytest.param(1, 0, 0, None, float("inf"), id="the sender sends nothing"),
    ],
)
def test_a_transfer_takes_its_bytes_and_those_before_it(
    size_bytes: int, backlog_bytes: int, bytes_per_s: float, measured: float | None, expected_s: float
) -> None:
    found_s = BandwidthTransfer().transfer_s(
        size_bytes, backlog_bytes=backlog_bytes, bytes_per_s=bytes_per_s, measured_bytes_per_s=measured
    )
    assert found_s == expected_s
