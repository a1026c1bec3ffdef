"""Promises of exposition.py: what Prometheus reads, by Prometheus' own parser."""

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvstore.telemetry.metrics.exposition import Collected, exposed
from kvstore.telemetry.metrics.histogram import Histogram
from kvstore.telemetry.metrics.metric import Metric, MetricKind, Readings

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
METRICS = (
    Metric("kvstore_x_read_bytes", MetricKind.COUNTER, "Bytes.", ("tier",)),
    Metric("kvstore_x_blocks", MetricKind.GAUGE, "Blocks."),
    Metric("kvstore_x_duration_seconds", MetricKind.HISTOGRAM, "Times.", ("operation",)),
    Metric("kvstore_x_absent", MetricKind.GAUGE, "Nobody gives it."),
)


def readings() -> Readings:
    histogram = Histogram((0.001, 0.01))
    histogram.observe(2_000_000, times=3)
    return {"kvstore_x_read_bytes": {("dram",): 5}, "kvstore_x_blocks": 7, "kvstore_x_duration_seconds": {("get",): histogram.counts()}}


def test_exposition_is_valid_open_metrics() -> None:
    body, content_type = exposed(METRICS, readings, OPEN_METRICS)
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}  # type: ignore[no-untyped-call]
    samples = [sample for family in families.values() if family.name.startswith("kvstore") for sample in family.samples]
    assert {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples} == {
        ("kvstore_x_read_bytes_total", (("tier", "dram"),)): 5,
        ("kvstore_x_blocks", ()): 7,
        ("kvstore_x_duration_seconds_bucket", (("le", "0.001"), ("operation", "get"))): 0,
        ("kvstore_x_duration_seconds_bucket", (("le", "0.01"), ("operation", "get"))): 3,
        ("kvstore_x_duration_seconds_bucket", (("le", "+Inf"), ("operation", "get"))): 3,
        ("kvstore_x_duration_seconds_sum", (("operation", "get"),)): 0.006,
        ("kvstore_x_duration_seconds_count", (("operation", "get"),)): 3,
    }
    assert families["kvstore_x_read_bytes"].unit == "bytes"
    assert "process_resident_memory_bytes" in families


def test_who_does_not_accept_it_gets_prometheus_own_text() -> None:
    body, content_type = exposed(METRICS, readings, "")
    assert content_type.startswith("text/plain")
    assert b'kvstore_x_read_bytes_total{tier="dram"} 5.0' in body


def test_registration_reads_nothing_and_is_unique() -> None:
    registry = CollectorRegistry()

    def never() -> Readings:
        raise AssertionError

    registry.register(Collected(METRICS, never))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(Collected(METRICS, never))
