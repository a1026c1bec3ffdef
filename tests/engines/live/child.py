"""A program that runs in an engine's environment for a test and reads commands as lines of JSON."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tests.engines.live import process_group
from tests.engines.live.environments import python_of

RUNNER: Final = Path(__file__).with_name("run_child.py")
STOP_S: Final = 20


class EngineChild:
    """Context manager: the program runs inside and has ended afterwards.

    The program responds on a descriptor of its own, because engines print to standard output.
    """

    def __init__(self, engine: str, program: Path, *arguments: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
        """Start the program and return before it is ready. `log` receives the output of the program and its engine."""
        self._log = log
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        read, write = os.pipe()
        with log.open("ab") as output:
            self._process = process_group.start(
                [python_of(engine), RUNNER, program, str(write), *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
                env=inherited | dict(environment or {}),
                text=True,
            )
        os.close(write)
        self._answers = open(read, encoding="utf-8")  # noqa: SIM115 - closed by close

    def __enter__(self) -> "EngineChild":
        """Once it is ready."""
        try:
            self.answer()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Have it call `do`, and wait for the answer. Fails with its log if it has died of that."""
        self.begin(do, **arguments)
        return self.answer()

    def begin(self, do: str, **arguments: Any) -> None:
        """As `ask`, for a caller that takes the answer later."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """To the next of what has begun."""
        line = self._answers.readline()
        if not line:
            self.close()  # why it ended it says at its very end
        assert line, f"it ended with {self._process.returncode}: {self.log}"
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        process_group.end(self._process, STOP_S)
        self._answers.close()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")
