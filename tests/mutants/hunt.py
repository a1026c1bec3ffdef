"""Checks that tests detect a mutant: its patch is applied to a copy of the tree, where tests that pass without it must fail."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.mutants.mutant import ROOT, Mutant

TESTS_FAILED: Final = 1
"""pytest's exit code for failed tests; any other but 0 means that the tests did not run."""
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_UNNEEDED: Final = shutil.ignore_patterns(".*", "build", "out", "__pycache__", "*.egg-info")


class Tree:
    """A copy of the project at `folder`, whose tests import the copy."""

    def __init__(self, folder: Path, source: Path = ROOT) -> None:
        self._folder = folder
        shutil.copytree(source, folder, ignore=_UNNEEDED, dirs_exist_ok=True)
        (folder / "build/typing").mkdir(parents=True)
        (folder / "build/typing/kvstore").symlink_to("../..")

    def failing(self, tests: Sequence[str], *, timeout_s: float) -> str | None:
        """Return the first failing test, None if all pass, or "timeout" if they hang. Raises RuntimeError if they did not run."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-rfE", "-m", "not slow", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"PYTHONPATH": str(self._folder / "build/typing"), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            run = subprocess.run(command, cwd=self._folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return "timeout"
        if run.returncode not in (0, TESTS_FAILED):
            raise RuntimeError(f"pytest ended with code {run.returncode}: {(run.stdout + run.stderr)[-2000:]}")
        found = _FAILED.search(run.stdout)
        return None if run.returncode == 0 else found[1] if found else "unknown"

    def caught_by(self, mutant: Mutant, *, timeout_s: float) -> str | None:
        """Apply the mutant, return the first failing test or None, and restore the tree."""
        path = self._folder / mutant.file
        sound = path.read_text()
        path.write_text(mutant.patched(sound))
        try:
            return self.failing(mutant.tests, timeout_s=timeout_s)
        finally:
            path.write_text(sound)
