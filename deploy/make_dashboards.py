"""Generates deploy/prometheus/alerts.yml and deploy/grafana/*.json from the metrics and alerts: `python deploy/make_dashboards.py`."""

import json
import sys
from pathlib import Path
from typing import Any, Final

from kvstore.telemetry.metrics.alerts import ALERTS, Alert
from kvstore.telemetry.metrics.metric import CLIENT, MASTER, NODE, PUBLISHER, ROUTER, SIDECAR, Metric, MetricKind

HERE: Final = Path(__file__).parent
COLUMNS: Final = 24
"""Width of Grafana's grid."""
DASHBOARDS: Final = {"node": NODE, "master": MASTER, "client": CLIENT, "router": ROUTER, "sidecar": SIDECAR, "publisher": PUBLISHER}
"""Role -> metrics; each dashboard has a panel per metric."""
OVERVIEW: Final[tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]] = (
    ("Nodes", "short", (("max by (state) (kvstore_master_nodes)", "{{state}}"),)),
    ("Partitions of the catalog, by their owners", "short", (("kvstore_master_partitions_owned", "{{instance}}"),)),
    ("Blocks", "short", (("sum(kvstore_master_blocks)", "can be found"), ("sum by (tier) (kvstore_node_tier_blocks)", "{{tier}}"))),
    (
        "Hit ratio of lookups at the master",
        "percentunit",
        (("1 - sum(rate(kvstore_master_lookup_misses_total[5m])) / sum(rate(kvstore_master_keys_asked_total[5m]))", "hits"),),
    ),
    ("Blocks read a second", "short", (("sum by (tier) (rate(kvstore_node_tier_hits_total[1m]))", "{{tier}}"),)),
    ("Blocks read a second, by tenant", "short", (("topk(8, sum by (tenant) (rate(kvstore_node_tier_hits_total[1m])))", "{{tenant}}"),)),
    (
        "How full the tiers are",
        "percentunit",
        (("sum by (tier) (kvstore_node_tier_used_bytes) / sum by (tier) (kvstore_node_tier_capacity_bytes)", "{{tier}}"),),
    ),
    ("Values taken in", "Bps", (("sum by (instance) (rate(kvstore_node_written_bytes_total[1m]))", "{{instance}}"),)),
    ("Evictions a second", "short", (("sum by (tier, reason) (rate(kvstore_node_tier_evictions_total[1m]))", "{{tier}} {{reason}}"),)),
    (
        "Bytes written to NVMe for each block read",
        "bytes",
        (
            (
                'sum by (instance) (rate(kvstore_node_tier_device_written_bytes_total{tier="nvme"}[1h])) / '
                "sum by (instance) (rate(kvstore_node_tier_hits_total[1h]))",
                "{{instance}}",
            ),
        ),
    ),
    (
        "Age of what is evicted, median",
        "s",
        (("histogram_quantile(0.5, sum by (le, tier) (rate(kvstore_node_eviction_age_seconds_bucket[10m])))", "{{tier}}"),),
    ),
    (
        "Requests at nodes, 99th percentile",
        "s",
        (("histogram_quantile(0.99, sum by (le, operation) (rate(kvstore_node_request_duration_seconds_bucket[5m])))", "{{operation}}"),),
    ),
    (
        "Requests at the master, 99th percentile",
        "s",
        (("histogram_quantile(0.99, sum by (le, operation) (rate(kvstore_master_request_duration_seconds_bucket[5m])))", "{{operation}}"),),
    ),
    (
        "Commits of the catalog",
        "s",
        tuple(
            (f"histogram_quantile({share}, sum by (le) (rate(kvstore_master_catalog_commit_duration_seconds_bucket[5m])))", f"p{share}")
            for share in (0.5, 0.99)
        ),
    ),
    ("Moved by rails", "Bps", (("sum by (instance, rail) (rate(kvstore_node_rail_delivered_bytes_total[1m]))", "{{instance}} {{rail}}"),)),
    (
        "Refused a second",
        "short",
        (
            ("sum by (reason) (rate(kvstore_node_requests_refused_total[5m]))", "nodes: {{reason}}"),
            ("sum by (reason) (rate(kvstore_master_requests_refused_total[5m]))", "master: {{reason}}"),
        ),
    ),
    (
        "First tokens at routers",
        "s",
        tuple(
            (f"histogram_quantile({share}, sum by (le) (rate(kvstore_router_time_to_first_token_seconds_bucket[5m])))", f"p{share}")
            for share in (0.5, 0.99)
        ),
    ),
    ("Memory of the daemons", "bytes", (('process_resident_memory_bytes{job=~"kvstore.*"}', "{{instance}}"),)),
)
"""(title, unit, queries) of each panel of the overview dashboard."""


def files() -> dict[Path, str]:
    """Return path -> content of the generated files."""
    found = {HERE / "prometheus" / "alerts.yml": alert_rules(), HERE / "grafana" / "kvstore.json": dashboard("kvstore", OVERVIEW)}
    for role, metrics in DASHBOARDS.items():
        panels = tuple((metric.help, unit(metric), queries(metric)) for metric in metrics if not metric.name.endswith("_info"))
        found[HERE / "grafana" / f"kvstore-{role}.json"] = dashboard(f"kvstore {role}", panels)
    return found


def alert_rules() -> str:
    """Return the alert rules as YAML for Prometheus."""
    head = "# Made by `python deploy/make_dashboards.py` from telemetry/metrics/alerts.py; tested with promtool.\n"
    return head + "groups:\n  - name: kvstore\n    rules:\n" + "".join(map(_rule, ALERTS))


def _rule(alert: Alert) -> str:
    def text(value: str) -> str:
        return json.dumps(value, ensure_ascii=False)  # JSON strings are valid YAML

    return (
        f"      - alert: {alert.name}\n        expr: {text(alert.expression)}\n        for: {alert.hold}\n"
        f"        labels:\n          severity: {alert.severity}\n"
        f"        annotations:\n          summary: {text(alert.summary)}\n          action: {text(alert.action)}\n"
    )


def unit(metric: Metric) -> str:
    """Return Grafana's name of the metric's unit."""
    if metric.kind is MetricKind.COUNTER:
        return "Bps" if metric.unit == "bytes" else "cps"
    return {"bytes": "bytes", "seconds": "s"}.get(metric.unit, "short")


def queries(metric: Metric) -> tuple[tuple[str, str], ...]:
    """Return the (query, legend) pairs of a metric's panel."""
    labels = ", ".join(("instance", *metric.labels))
    legend = " ".join(f"{{{{{label}}}}}" for label in ("instance", *metric.labels))
    match metric.kind:
        case MetricKind.COUNTER:
            return ((f"sum by ({labels}) (rate({metric.exported_name}[$__rate_interval]))", legend),)
        case MetricKind.GAUGE:
            return ((f"sum by ({labels}) ({metric.name})", legend),)
        case MetricKind.HISTOGRAM:
            rate = f"sum by (le, {labels}) (rate({metric.name}_bucket[$__rate_interval]))"
            return tuple((f"histogram_quantile({share}, {rate})", f"{legend} p{share}") for share in (0.5, 0.99))


def dashboard(title: str, panels: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]) -> str:
    """Return a dashboard as JSON: two panels per row, with the data source as a variable."""
    width, height = COLUMNS // 2, 8
    shown = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": name,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "gridPos": {"x": number % 2 * width, "y": number // 2 * height, "w": width, "h": height},
            "fieldConfig": {"defaults": {"unit": measured_in, "min": 0, "custom": {"showPoints": "never"}}, "overrides": []},
            "options": {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list", "placement": "bottom"}},
            "targets": [
                {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend} for place, (query, legend) in enumerate(asked)
            ],
        }
        for number, (name, measured_in, asked) in enumerate(panels)
    ]
    found: dict[str, Any] = {
        "uid": title.replace(" ", "-"),
        "title": title,
        "tags": ["kvstore"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}]},
        "links": [{"type": "dashboards", "tags": ["kvstore"], "title": "kvstore", "asDropdown": True}],
        "panels": shown,
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
