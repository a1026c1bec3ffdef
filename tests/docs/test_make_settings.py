"""Promise of docs/make_settings.py: what it prints is what stands in docs/settings.md."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from kvstore.protocol.variables import SECTIONS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_documented_settings_are_those_of_the_code() -> None:
    made = subprocess.run([sys.executable, str(DOCS / "make_settings.py")], capture_output=True, text=True, check=True)
    assert made.stdout == (DOCS / "settings.md").read_text(encoding="utf-8"), "run: python docs/make_settings.py > docs/settings.md"


def test_every_section_is_known_to_the_check_of_misspelt_variables() -> None:
    spec = importlib.util.spec_from_file_location("make_settings", DOCS / "make_settings.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert {section for _, _, section, _ in made.PROGRAMS} == SECTIONS
