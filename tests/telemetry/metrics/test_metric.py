"""Promises of metric.py."""

import re

from kvstore.telemetry.metrics.metric import CLIENT, MASTER, METRICS, NODE, PUBLISHER, ROUTER, SIDECAR, MetricKind

LABELS = {"name", "version", "operation", "method", "reason", "tier", "tenant", "transport", "rail", "state", "outcome"} | {
    *("action", "result", "setting", "kind"),
}


def test_names_follow_the_rules_and_are_unlike() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    roles = {"node": NODE, "master": MASTER, "client": CLIENT, "router": ROUTER, "sidecar": SIDECAR, "publisher": PUBLISHER}
    for role, metrics in roles.items():
        for metric in metrics:
            assert re.fullmatch(rf"kvstore_{role}(_[a-z]+)+", metric.name), metric
            assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_milliseconds", "_mib")), metric


def test_metrics_have_units_and_help() -> None:
    for metric in METRICS:
        assert metric.kind is not MetricKind.HISTOGRAM or metric.unit == "seconds", metric
        assert metric.unit != "seconds" or metric.kind is not MetricKind.COUNTER, metric
        assert metric.help.endswith("."), metric


def test_labels_are_few() -> None:
    assert {label for metric in METRICS for label in metric.labels} <= LABELS
    assert max(len(metric.labels) for metric in METRICS) == 2
