"""Promises of launch.py, in real processes."""

import os
import subprocess
import sys
from pathlib import Path

from kvstore.cli.tools import launch

LAUNCHER = Path(launch.__file__)


def run(starter_pid: int, *program: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-I", "-S", str(LAUNCHER), str(starter_pid), *program]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_it_becomes_the_program_with_its_arguments_and_status() -> None:
    done = run(os.getpid(), sys.executable, "-c", "import sys; print(sys.argv[1]); sys.exit(7)", "--flag=1")
    assert (done.stdout, done.returncode) == ("--flag=1\n", 7)


def test_a_program_whose_starter_is_gone_already_does_not_begin() -> None:
    done = run(1, sys.executable, "-c", "print('began')")
    assert (done.stdout, done.returncode) == ("", 1)
