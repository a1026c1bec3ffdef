"""Promises of top_figures.py."""

import pytest

from kvstore.client.tools.top_figures import count_text, latency_text, spark_lines


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (9999, "9,999"), (12_345, "12.3 k"), (2_500_000, "2.5 M"), (3e9, "3.0 G")])
def test_counts_are_short(value: float, text: str) -> None:
    assert count_text(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.000085, "85 us"), (0.0012, "1.2 ms"), (3.4, "3.40 s")])
def test_latencies_have_a_unit_that_fits(seconds: float, text: str) -> None:
    assert latency_text(seconds) == text


def test_the_highest_bar_fills_all_lines_and_nothing_is_a_level() -> None:
    assert spark_lines([0, 2, 4], 1) == ["▁▄█"]
    assert spark_lines([0, 2, 3, 4], 2) == ["  ▄█", "▁███"]
    assert spark_lines([], 2) == ["", ""]
    assert spark_lines([0, 0], 1) == ["▁▁"]
