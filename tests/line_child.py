"""A process that a test speaks with: a line in, a line of JSON out. It can be stopped and killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self


class LineChild:
    """`python -m MODULE ARGUMENTS`, from construction to the end of the context."""

    def __init__(
        self, module: str, *arguments: str, python: str | Path = sys.executable, environment: Mapping[str, str] | None = None
    ) -> None:
        """`python` and `environment`: by default those of this process."""
        command = [python, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process failed: see its standard error"
        return json.loads(line)

    def tell(self, line: str) -> Any:
        """What it answers."""
        self.send(line)
        return self.answer()

    def send(self, line: str) -> None:
        """As `tell`, for a caller that asks for the answer later."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def stop(self) -> None:
        """It does not run until `go_on`."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It ends at once, as in a crash."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
