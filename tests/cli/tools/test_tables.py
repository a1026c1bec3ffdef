"""Tests of tables.py."""

import pytest
from rich.console import Console

from kvstore.cli.tools import tables
from kvstore.cli.tools.tables import progress


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (True, False):
        console = Console(force_terminal=is_terminal, width=80, record=True, stderr=True)
        monkeypatch.setattr(tables, "Console", lambda stderr, console=console: console)
        with progress("replaying", 3) as on_done:
            for _ in range(3):
                on_done()
        assert ("replaying" in console.export_text()) == is_terminal
