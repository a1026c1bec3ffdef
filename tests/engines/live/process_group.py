"""Process groups of engines: each ends as a whole, at the latest when the process that started it does, even if that one is killed.

Run as a program it is the watchdog of one process: it reads process groups from standard input and kills those that are left at its end.
"""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

CLOSE_S: Final = 60.0


class Watchdog:
    """Process in a session of its own that kills the groups it watches once this process has ended. Not thread-safe."""

    def __init__(self) -> None:
        command = [sys.executable, "-SP", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, text=True)
        atexit.register(self._close)

    def watch(self, group: int) -> None:
        self._tell(group)

    def forget(self, group: int) -> None:
        """The group has ended: another one may get its number."""
        self._tell(-group)

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        print(number, file=self._process.stdin, flush=True)

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(CLOSE_S)


@cache
def watchdog() -> Watchdog:
    """The watchdog of this process."""
    return Watchdog()


def start(command: Sequence[Any], **popen: Any) -> "subprocess.Popen[Any]":
    """Start a process as the leader of a session, and so of a process group, with Popen's own keywords. The caller calls `end`."""
    watchdog()  # before there is anything to watch
    return watched(subprocess.Popen(command, start_new_session=True, **popen))


def watched(process: "subprocess.Popen[Any]") -> "subprocess.Popen[Any]":
    """Have the group that this process leads end with the caller's process. The caller calls `end`."""
    watchdog().watch(process.pid)
    return process


def end(process: "subprocess.Popen[Any]", patience_s: float = 0.0) -> None:
    """Wait for the leader, at most `patience_s`, then kill all that is left of its group. A second call is a no-op."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    kill(process.pid)
    process.wait()
    watchdog().forget(process.pid)


def kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def kill_rest(lines: Iterable[str]) -> None:
    """Read groups that begin, and negated those that have ended, to the end of `lines`; kill the others."""
    left: set[int] = set()
    for line in lines:
        number = int(line)
        if number > 0:
            left.add(number)
        else:
            left.discard(-number)
    for group in left:
        kill(group)


if __name__ == "__main__":
    kill_rest(sys.stdin)
