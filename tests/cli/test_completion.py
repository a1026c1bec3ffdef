"""Promises of completion.py, with the shell that it is for."""

import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from kvstore.cli.main import kvstore

PROGRAM = '#!/bin/sh\nexec "{python}" -m kvstore.cli.main "$@"\n'
ASKS = """
source "$SCRIPT"
COMP_WORDS=(kvstore {words}) COMP_CWORD={at}
_kvstore_completion kvstore
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(folder: Path, *words: str) -> list[str]:
    """Return the completions that bash offers for the last word."""
    program = folder / "kvstore"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    script = folder / "script"
    script.write_text(CliRunner().invoke(kvstore, ["completion", "bash"], catch_exceptions=False).output)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SCRIPT": str(script)}
    asks = ASKS.format(words=" ".join(word or "''" for word in words), at=len(words))
    done = subprocess.run(["bash", "-c", asks], env=environment, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.split()


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    assert completed(tmp_path, "stat") == ["status"]
    assert sorted(completed(tmp_path, "quota", "s")) == ["set", "show"]
    assert completed(tmp_path, "drain", "--wa") == ["--wait-s"]
