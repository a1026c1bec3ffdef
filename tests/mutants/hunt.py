"""Whether the tests catch a mutant: it is put into a copy of the tree, and its tests have to fail there that pass without it."""

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
"""Of pytest's exit codes; with any other it has not come to run them all, and nothing is known."""
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
        """The first test of `make test` that fails, by name; None if all pass. Raises RuntimeError: they did not run. A mutant that makes
        tests hang is caught too, by name "timeout"."""
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
        """The first test that fails with the bug in the tree, which is taken out again; None: none does."""
        path = self._folder / mutant.file
        sound = path.read_text()
        path.write_text(mutant.patched(sound))
        try:
            return self.failing(mutant.tests, timeout_s=timeout_s)
        finally:
            path.write_text(sound)
