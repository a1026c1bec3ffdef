"""Promises of bandwidth.py: it finds the rate of delivery, whatever the number in flight, and follows it."""

import pytest

from kvstore.transfer.paths.path_chooser import SAMPLE_BYTES, Bandwidth, Measured

MIB = 1 << 20
SECOND_NS = 1_000_000_000


def deliver(bandwidth: Bandwidth, *, bytes_s: float, begin_ns: int, took_s: float, size_bytes: int = MIB) -> int:
    """Slices one after another at this rate, without a pause; returns when that ended."""
    bandwidth.restart(begin_ns)
    now_ns = begin_ns
    for number in range(1, int(took_s * bytes_s / size_bytes) + 1):
        now_ns = begin_ns + int(number * size_bytes / bytes_s * 1e9)
        bandwidth.delivered(size_bytes, now_ns, is_idle=False)
    return now_ns


def test_what_was_measured_is_told_with_what_it_rests_on_once_that_is_enough() -> None:
    bandwidth = Bandwidth(1.0)
    assert bandwidth.measured() is None
    bandwidth.restart(0)
    bandwidth.delivered(SAMPLE_BYTES - 1, 1000, is_idle=True)
    assert bandwidth.measured_ns == 1000, "it is at least that fast"
    assert bandwidth.measured() is None, "but nobody knows how fast"
    bandwidth = Bandwidth(1e9)
    bandwidth.delivered(SAMPLE_BYTES, SECOND_NS, is_idle=False)
    assert bandwidth.measured() == Measured(SAMPLE_BYTES, SAMPLE_BYTES, SECOND_NS)


@pytest.mark.parametrize("size_bytes", [4096, 64 << 10, MIB, 16 * MIB])
def test_the_rate_is_found_whatever_the_size_of_slices(size_bytes: int) -> None:
    bandwidth = Bandwidth(12.5e9)
    deliver(bandwidth, bytes_s=5e8, begin_ns=0, took_s=1.0, size_bytes=size_bytes)
    assert bandwidth.bytes_s == pytest.approx(5e8, rel=0.01)


@pytest.mark.parametrize(("before", "after"), [(5e8, 5e7), (5e7, 5e8)])
def test_a_change_of_rate_is_followed_within_a_second(before: float, after: float) -> None:
    bandwidth = Bandwidth(1e9)
    changed_ns = deliver(bandwidth, bytes_s=before, begin_ns=0, took_s=2.0)
    deliver(bandwidth, bytes_s=after, begin_ns=changed_ns, took_s=1.0)
    assert bandwidth.bytes_s == pytest.approx(after, rel=0.25)


def test_time_with_nothing_in_flight_does_not_count() -> None:
    bandwidth = Bandwidth(1e9)
    for second in range(10):
        bandwidth.restart(second * SECOND_NS)
        bandwidth.delivered(MIB, second * SECOND_NS + 10_000_000, is_idle=True)
    assert bandwidth.bytes_s == pytest.approx(MIB * 100, rel=0.01)


def test_after_a_long_idle_time_one_slice_outweighs_the_past() -> None:
    bandwidth = Bandwidth(1e9)
    ended_ns = deliver(bandwidth, bytes_s=1e9, begin_ns=0, took_s=2.0)
    later_ns = ended_ns + 5 * SECOND_NS
    bandwidth.restart(later_ns)
    bandwidth.delivered(MIB, later_ns + 10_000_000, is_idle=True)
    assert bandwidth.bytes_s == pytest.approx(MIB * 100, rel=0.1)


def test_a_few_bytes_alone_may_raise_the_rate_and_not_lower_it() -> None:
    bandwidth = Bandwidth(1e9)
    ended_ns = deliver(bandwidth, bytes_s=1e8, begin_ns=0, took_s=1.0)
    few_bytes = SAMPLE_BYTES - 1
    bandwidth.restart(ended_ns)
    bandwidth.delivered(few_bytes, ended_ns + SECOND_NS, is_idle=True)
    assert bandwidth.bytes_s == pytest.approx(1e8)
    bandwidth.restart(ended_ns + SECOND_NS)
    bandwidth.delivered(few_bytes, ended_ns + SECOND_NS + 1000, is_idle=True)
    assert bandwidth.bytes_s > 1.01e8
