"""Early ends of a command: signals, and standard output that cannot be written."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

_UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return SIGINT, SIGTERM and SIGHUP, less those that were ignored at the start of the command.

    nohup ignores SIGHUP; a shell ignores SIGINT for background jobs of a script.
    """
    candidates = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return tuple(number for number in candidates if signal.getsignal(number) is not signal.SIG_IGN)


def run_with_output_errors(command: Callable[[], object], status: int) -> None:
    """Run the command; if standard output cannot be written (disk full), print one line and exit with `status`.

    Output is discarded if the parent process closed standard output.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - to the end of the process
    try:
        try:
            command()
        finally:
            sys.stdout.flush()  # else the interpreter flushes at exit and prints an error of its own
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        what = "standard output" if error.filename is None else error.filename
        try:
            print(f"kvstore: error: {what} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)  # a flush at exit would fail again
