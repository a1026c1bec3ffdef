"""Becomes another program that ends when its starter does: `python launch.py STARTER_PID PROGRAM ARGUMENT...`.

A file to be run, not imported, and quick to start. In the child, not by `preexec_fn`: code between fork and exec of a process with
threads (gRPC's) can deadlock. The kernel remembers the wish over exec. It is tied to the *thread* that started the child.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Never returns."""
    starter_pid, program = int(arguments[0]), arguments[1:]
    end_with(starter_pid)
    os.execv(program[0], program)


def end_with(starter_pid: int) -> None:
    """Have this process get SIGTERM when its parent ends; it ends now if that has happened."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    # The starter may have gone before the wish was made known.
    if os.getppid() != starter_pid:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
