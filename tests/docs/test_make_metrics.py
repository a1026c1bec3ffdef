"""Promise of docs/make_metrics.py: what it prints is what stands in docs/metrics.md."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_documented_metrics_are_those_of_the_code() -> None:
    made = subprocess.run([sys.executable, str(DOCS / "make_metrics.py")], capture_output=True, text=True, check=True)
    assert made.stdout == (DOCS / "metrics.md").read_text(encoding="utf-8"), "run: python docs/make_metrics.py > docs/metrics.md"
