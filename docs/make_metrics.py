"""Prints docs/metrics.md, from the list of metrics: `python docs/make_metrics.py > docs/metrics.md`."""

import sys
from typing import Final

from kvstore.telemetry.metrics.metric import CLIENT, MASTER, NODE, PUBLISHER, ROUTER, SIDECAR, Metric

HEAD: Final = """# Metrics

Made by `python docs/make_metrics.py > docs/metrics.md` from `telemetry/metrics/metric.py`; a test holds it to the code, and another one
a real cluster's answers to the list.

Every daemon answers `/metrics` on its HTTP port ([operations.md](operations.md#health)): OpenMetrics, or Prometheus' own text for who does
not accept that. Names and units are Prometheus' (seconds, bytes, `_total`); no label has a key's value, and of tenants the busiest are told
apart. Counters begin anew with the process. All daemons tell of their process, too: `process_resident_memory_bytes`,
`process_cpu_seconds_total`, `process_open_fds`, `process_start_time_seconds` and so on.

`deploy/prometheus/alerts.yml` has alert rules over these, `deploy/grafana/` dashboards; both are made from the same list. Rules and panels
take each daemon's `job` to begin with `kvstore`.
"""
SECTIONS: Final[tuple[tuple[str, str, tuple[Metric, ...]], ...]] = (
    ("kvstore-node", "Reads of shared memory are in the hits, and in no duration here: the node is not asked.\n\n", NODE),
    ("kvstore-master", "Those from `kvstore_master_nodes` on are told by the catalog's owner only.\n\n", MASTER),
    ("Client and AsyncClient", "Offered to the engine's own registry: `client.metrics().register(registry)`.\n\n", CLIENT),
    ("kvstore-router", "", ROUTER),
    ("kvstore-sidecar", "", SIDECAR),
    ("kvstore-publisher", "", PUBLISHER),
)
"""Title, remark and metrics of each."""


def text() -> str:
    """The whole file."""
    return HEAD + "".join(f"\n## {title}\n\n{remark}{table(metrics)}" for title, remark, metrics in SECTIONS)


def table(metrics: tuple[Metric, ...]) -> str:
    rows = [f"| `{metric.exported_name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |\n" for metric in metrics]
    return "| metric | kind | labels | meaning |\n|---|---|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(text())
