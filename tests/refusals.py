"""Runs programs that refuse to start, within the test process: a process of its own would take 0.7 s each."""

import logging
import os

import click
from click.testing import CliRunner

PROGRAM_LOG = logging.getLogger("kvstore")


class _Lines(logging.Handler):
    """Collects the log lines that a daemon would write to standard error."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def refused_here(command: click.Command, *flags: str) -> str:
    """Return the error line of a program that must exit with status 2 and print and log nothing else. KVSTORE_* variables are hidden."""
    hidden = {name: None for name in os.environ if name.startswith("KVSTORE_")}
    logged, level = _Lines(), PROGRAM_LOG.level
    PROGRAM_LOG.addHandler(logged)
    PROGRAM_LOG.setLevel(logging.INFO)
    try:
        done = CliRunner(env=hidden).invoke(command, flags, catch_exceptions=False)
    finally:
        PROGRAM_LOG.removeHandler(logged)
        PROGRAM_LOG.setLevel(level)
    assert done.exit_code == 2, (done.exit_code, done.stderr)
    assert done.stdout == ""
    [line] = [*(line for line in done.stderr.splitlines() if line.strip()), *logged.lines]
    return line
