"""Programs that refuse to start. Most run in this process: they get as far as their settings, and a process of its own costs each 0.7 s."""

import logging
import os

import click
from click.testing import CliRunner

PROGRAM_LOG = logging.getLogger("kvstore")


class _Lines(logging.Handler):
    """What would stand on standard error of a daemon, which logs there."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def refused_here(command: click.Command, *flags: str) -> str:
    """The one line with which the program refuses to start; its exit status is 2, and it says and logs nothing else.

    Of the environment's KVSTORE_* variables it sees none.
    """
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
