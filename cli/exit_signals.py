"""How a command ends before it is through: by signals, and where what it prints cannot be written."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

_UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, SIGTERM, and SIGHUP, which says that the terminal is gone: but what was ignored when the command began, as nohup does with
    SIGHUP and a shell with Ctrl-C for what it runs beside a script."""
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return tuple(number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN)


def ends_in_a_line(command: Callable[[], object], status: int) -> None:
    """Carry it out; where the disk under standard output is full, or that is gone, say so, and exit with that status. What it prints goes
    nowhere where who began it has closed standard output."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - to the end of the process
    try:
        try:
            command()
        finally:
            sys.stdout.flush()  # or the interpreter would, and say in its own words why it cannot
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        what = "standard output" if error.filename is None else error.filename
        try:
            print(f"kvstore: error: {what} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)  # what is still to be written would fail once more
