"""Executes a program that gets SIGTERM when its parent ends: `python launch.py PARENT_PID PROGRAM ARGUMENT...`.

A script, not a module to import, and quick to start. It replaces `preexec_fn`, which can deadlock between fork and exec of a process with
threads (gRPC's). PR_SET_PDEATHSIG survives exec, and is tied to the *thread* that started the child.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Request the parent-death signal and execute the program. Does not return."""
    parent_pid, program = int(arguments[0]), arguments[1:]
    end_with(parent_pid)
    os.execv(program[0], program)


def end_with(parent_pid: int) -> None:
    """Request SIGTERM for this process when its parent ends; exit if the parent has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    # The parent may have ended before prctl.
    if os.getppid() != parent_pid:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
