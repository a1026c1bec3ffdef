"""docs/promises.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "promises.md").read_text())))
SUITES = ("testing/tier_conformance.py", "testing/tier_machine.py")
"""Which every tier's tests inherit."""


def test_a_test_that_holds_a_promise_exists() -> None:
    for path, name in NAMED:
        file = ROOT / path if path in SUITES else ROOT / "tests" / path
        assert re.search(rf"^\s*(?:async )?(?:def|class) {name}\b", file.read_text(), re.MULTILINE), f"{path} has no {name}"


def test_every_promise_names_a_test() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", (ROOT / "docs" / "promises.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    assert [promise for promise, tests in rows if promise not in ("promise", "---") and "::" not in tests] == []
