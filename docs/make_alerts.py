"""Prints docs/alerts.md, from the alert rules: `python docs/make_alerts.py > docs/alerts.md`."""

import re
import sys
from typing import Final

from kvstore.telemetry.metrics.alerts import ALERTS, Alert, Severity

HEAD: Final = """# Alerts

Made by `python docs/make_alerts.py > docs/alerts.md` from `telemetry/metrics/alerts.py`, as `deploy/prometheus/alerts.yml` is.

Load `deploy/prometheus/alerts.yml` into Prometheus (`rule_files`). A rule fires after its expression has held for as long as "after" says.
The commands take the cluster from `KVSTORE_MASTER`, and an operator's token from `KVSTORE_CLIENT_TOKEN`.

- **critical**: blocks are lost, or cannot be put or found. Act now.
- **warning**: service goes on, or will end. Act this week.
"""
LABEL: Final = re.compile(r"{{ \$(?:labels\.)?(\w+)(?: \| \w+)? }}")
"""A value that Prometheus fills in."""


def text() -> str:
    """The whole file."""
    return HEAD + "".join(f"\n## {severity.value.title()}\n\n{table(severity)}" for severity in Severity)


def table(severity: Severity) -> str:
    rows = [row(alert) for alert in ALERTS if alert.severity is severity]
    return "| alert | after | what happened | do |\n|---|---|---|---|\n" + "".join(rows)


def row(alert: Alert) -> str:
    cells = (f"`{alert.name}`", alert.hold, *(LABEL.sub(r"*\1*", text) for text in (alert.summary, alert.action)))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


if __name__ == "__main__":
    sys.stdout.write(text())
