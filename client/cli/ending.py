"""How a command ends before it is through: by signals, and where what it prints cannot be written."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

_UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, SIGTERM, and SIGHUP, which says that the terminal is gone: unless it was ignored when the command began, as nohup does."""
    outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if outlives_terminal else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ends_in_a_line(command: Callable[[], object], status: int) -> None:
    """Carry it out; where the disk under standard output is full, say so, and exit with that status."""
    try:
        try:
            command()
        finally:
            sys.stdout.flush()  # or the interpreter would, and say in its own words why it cannot
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        print(f"kvstore: error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(status)  # what is still to be written would fail once more
