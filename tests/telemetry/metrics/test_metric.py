"""Promises of metric.py."""

from kvstore.telemetry.metrics.metric import Kind, Metric


def test_the_unit_is_the_last_word_of_the_name() -> None:
    assert Metric("a_b_seconds", Kind.HISTOGRAM, "").unit == "seconds"
    assert Metric("a_b_bytes", Kind.COUNTER, "").unit == "bytes"
    assert Metric("a_b_blocks", Kind.GAUGE, "").unit == ""


def test_a_counter_is_shown_with_total() -> None:
    assert Metric("a_b_bytes", Kind.COUNTER, "").shown_name == "a_b_bytes_total"
    assert Metric("a_b_bytes", Kind.GAUGE, "").shown_name == "a_b_bytes"
