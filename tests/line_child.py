"""A process that a test speaks with: a line in, a line of JSON out. It can be stopped and killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from kvstore.testing.transfer.awaited import eventually
from tests.forked import Forked, is_forked


class LineChild:
    """`python -m MODULE ARGUMENTS`, from construction to the end of the context.

    It is forked from the template, and runs the module's `main`. In a process that was itself forked it is started as a program. Errors go
    to this process's standard error."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process: subprocess.Popen[str] | Forked
        if is_forked():
            command = [sys.executable, "-m", module, *arguments]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        else:
            self._process = Forked(module, arguments, environment=os.environ, stderr=sys.__stderr__, has_input=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process failed: see its standard error"
        return json.loads(line)

    def tell(self, line: str) -> Any:
        """Send a line and return the reply."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self.answer()

    def stop(self) -> None:
        """It does not run until `go_on`."""
        self._process.send_signal(signal.SIGSTOP)
        eventually(self._is_stopped, "all of its threads have stopped")

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It ends at once, as in a crash."""
        self._process.kill()
        self._process.wait()

    def _is_stopped(self) -> bool:
        states = [status.read_text().rpartition(") ")[2][0] for status in Path(f"/proc/{self._process.pid}/task").glob("*/stat")]
        return set(states) == {"T"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
