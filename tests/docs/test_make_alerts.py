"""Promises of docs/make_alerts.py: what it prints is what stands in docs/alerts.md, each rule in one row."""

import subprocess
import sys
from pathlib import Path

from kvstore.telemetry.metrics.alerts import ALERTS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_documented_alerts_are_those_of_the_code() -> None:
    made = subprocess.run([sys.executable, str(DOCS / "make_alerts.py")], capture_output=True, text=True, check=True)
    assert made.stdout == (DOCS / "alerts.md").read_text(encoding="utf-8"), "run: python docs/make_alerts.py > docs/alerts.md"
    rows = [line for line in made.stdout.splitlines() if line.startswith("| `Kvstore")]
    assert len(rows) == len(ALERTS)
    assert "{{" not in made.stdout, "a value that Prometheus fills in"
