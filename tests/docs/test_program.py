"""A program of a page ends as it would by itself, and Python minds what it is told to."""

import os
from pathlib import Path

import pytest

from kvstore.transfer.testing.waiting import PATIENCE_S
from tests.forked import Forked

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("code", "said", "complaint", "status"),
    [
        ("print(__name__)", "__main__\n", "", 0),
        ("import threading; threading.Timer(0.01, print, ['later']).start()", "later\n", "", 0),
        ("import atexit; atexit.register(print, 'at the end')", "at the end\n", "", 0),
        ("import warnings; warnings.warn('so')", "", "UserWarning: so\n", 1),
        ("file = open('/dev/null')", "", "ResourceWarning: unclosed file", 0),
        ("import gc; held = [open('/dev/null')]; held.append(held)", "", "ResourceWarning: unclosed file", 0),
        ("print('before'); raise SystemExit(3)", "before\n", "", 3),
    ],
)
def test_a_program_ends_as_it_would_by_itself(code: str, said: str, complaint: str, status: int, tmp_path: Path) -> None:
    with (tmp_path / "errors").open("w") as errors:
        done = Forked("tests.docs.program", [code], environment=os.environ, stderr=errors, options=("-W", "error"))
    assert done.stdout is not None
    with done.stdout:
        assert (done.stdout.read(), done.wait(PATIENCE_S)) == (said, status)
    errors_said = (tmp_path / "errors").read_text()
    assert complaint in errors_said
    assert bool(errors_said) == bool(complaint)
