"""Promise of docs/make_settings.py: what it prints is what stands in docs/settings.md."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_documented_settings_are_those_of_the_code() -> None:
    made = subprocess.run([sys.executable, str(DOCS / "make_settings.py")], capture_output=True, text=True, check=True)
    assert made.stdout == (DOCS / "settings.md").read_text(encoding="utf-8"), "run: python docs/make_settings.py > docs/settings.md"
