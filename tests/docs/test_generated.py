"""Tests of the pages and pictures that scripts of docs/ make: each is what its script prints now."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.protocol.settings import settings_of
from kvstore.protocol.variables import SHARED
from tests.docs.programs import sections

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("script", "page"),
    [
        ("make_alerts.py", "alerts.md"),
        ("make_metrics.py", "metrics.md"),
        ("make_promises.py", "promise-tests.md"),
        ("make_settings.py", "settings.md"),
    ],
)
def test_a_page_is_what_its_script_prints(script: str, page: str) -> None:
    made = subprocess.run([sys.executable, str(DOCS / script)], capture_output=True, text=True, check=True)
    assert made.stdout == (DOCS / page).read_text(encoding="utf-8"), f"run: python docs/{script} > docs/{page}"


def test_shared_settings_are_known_to_the_spell_check() -> None:
    fields = [field for _, kind in sections() for field in settings_of(kind)]
    assert {field.name for field in fields if field.metadata["shared"]} == SHARED
