"""Promise of docs/make_remapping.py: docs/remapping.svg is what it prints, and shows the plan that the code makes."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_picture_is_that_of_the_code() -> None:
    made = subprocess.run([sys.executable, str(DOCS / "make_remapping.py")], capture_output=True, text=True, check=True)
    assert made.stdout == (DOCS / "remapping.svg").read_text(encoding="utf-8"), "run: python docs/make_remapping.py > docs/remapping.svg"
