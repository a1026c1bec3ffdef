"""Two processes of one peer library, a target and an initiator, that stay up and are asked for one figure at a time. See peer_child.py.

So rounds of several peers can take turns, and no start is measured. Between requests both processes are stopped: the threads of NIXL and
UCX would otherwise take whole processors from the measured peer.
"""

import json
import os
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.peer_child import SMALL_BYTES

ROOT: Final = Path(__file__).resolve().parent.parent
START_DEADLINE_S: Final = 60.0
ANSWER_DEADLINE_S: Final = 60.0


class PeerPair:
    """A context manager: both processes run within it. One thread."""

    def __init__(self, module: str, *, python: str, environment: dict[str, str]) -> None:
        """`module` is run by `python` with `environment` added to ours. Raises RuntimeError with what the processes said."""
        self._command = [python, "-m", module]
        self._environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._processes: list[subprocess.Popen[str]] = []
        try:
            target = self._start("target")
            described = self._answer(target, START_DEADLINE_S)
            initiator = self._start("initiator")
            self._ask(initiator, described, START_DEADLINE_S)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def gb_s(self, operation: str, block_bytes: int, seconds: float) -> float:
        """GB/s of batches of 32 blocks, "read" or "write", over about so many seconds; their bytes have been compared."""
        question = {"operation": operation, "block_bytes": block_bytes, "seconds": seconds}
        return float(self._ask_thawed(question, seconds + ANSWER_DEADLINE_S)["gb_s"])

    def latency_us(self) -> tuple[float, float]:
        """Median and 99th percentile of 4 KiB reads."""
        answer = self._ask_thawed({"operation": "latency", "block_bytes": SMALL_BYTES}, ANSWER_DEADLINE_S)
        return answer["p50"], answer["p99"]

    def close(self) -> None:
        """Kill both: what they have to say has been said, and some libraries do not end cleanly. A second close is a no-op."""
        for process in self._processes:
            with suppress(BrokenPipeError), process:
                process.kill()
        self._processes.clear()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, role: str) -> "subprocess.Popen[str]":
        self._processes.append(
            subprocess.Popen(
                [*self._command, role],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=self._environment,
                cwd=ROOT,
                text=True,
            )
        )
        return self._processes[-1]

    def _ask_thawed(self, question: Any, deadline_s: float) -> Any:
        self._signal(signal.SIGCONT)
        try:
            return self._ask(self._processes[1], question, deadline_s)
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _ask(self, process: "subprocess.Popen[str]", question: Any, deadline_s: float) -> Any:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps(question), file=process.stdin, flush=True)
        return self._answer(process, deadline_s)

    def _answer(self, process: "subprocess.Popen[str]", deadline_s: float) -> Any:
        """The next line that is JSON: libraries print to the same output."""
        assert process.stdout is not None
        overdue = threading.Timer(deadline_s, process.kill)
        overdue.start()
        try:
            for line in process.stdout:
                with suppress(json.JSONDecodeError):
                    return json.loads(line)
        finally:
            overdue.cancel()
        raise RuntimeError(f"{' '.join(self._command)} ended: {self._complaint()}")

    def _complaint(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it was killed, at its deadline"
