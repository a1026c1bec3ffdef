"""Runs the parts of `make gpu`, each in a process of its own with a deadline, and reports all rows.

A part that fails, hangs or crashes keeps the rows it had, and adds one that gives the reason. The exit status is 1 if
any did, or a test failed. Rows go to benchmarks/out/gpu.json, what parts printed to build/gpu/logs.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.gpu.parts import PARTS
from benchmarks.harness import report
from kvstore.cli.tools.bench import BenchRow

OUT: Final = Path(__file__).parents[1] / "out" / "gpu.json"
LOGS: Final = Path(__file__).parents[2] / "build" / "gpu" / "logs"
"""What each part printed."""
ALL_S: Final = 330.0
"""Deadline of all parts together."""
LOG_LINES: Final = 60


class Runs:
    """Runs of parts, one after another."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + ALL_S
        self.has_failed = False

    def rows(self, names: list[str]) -> Iterator[BenchRow]:
        for name in names or PARTS:
            begun_s = time.monotonic()
            yield from self._part(name)
            yield BenchRow(f"{name}: took", time.monotonic() - begun_s, "s")

    def _part(self, name: str) -> Iterator[BenchRow]:
        with tempfile.TemporaryDirectory(prefix="kvstore-gpu-") as folder:
            rows, log = Path(folder, "rows"), Path(folder, "log")
            rows.touch()
            has_failed = False
            reason = self._run(name, rows, log)
            for line in rows.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a killed part may leave half a line
                    row = BenchRow(**json.loads(line))
                    has_failed |= row.met is False and row.unit in ("failed", "tests")
                    yield row
            shutil.copy(log, LOGS / f"{name}.log")
            if reason or has_failed:
                self.has_failed = True
                print("\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]), file=sys.stderr)
            if reason:
                yield BenchRow(f"{name}: {reason}", 0, "failed", "complete", False)

    def _run(self, name: str, rows: Path, log: Path) -> str:
        """Run a part to its end or deadline. Return why it is not complete, or ""."""
        limit_s = min(PARTS[name].seconds, self._until_s - time.monotonic())
        if limit_s < 1:
            return "not begun, the time is over"
        print(f"--- {name}: {PARTS[name].title}, at most {limit_s:.0f} s", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.gpu.parts", name, str(rows)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return f"cut off after {limit_s:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):  # what the part has started, too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return f"ended with status {status}: {_last_line(log)}" if status else ""


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def main() -> int:
    unknown = [name for name in sys.argv[1:] if name not in PARTS]
    if unknown:
        sys.exit(f"no part {unknown[0]!r}: there are {', '.join(PARTS)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    runs = Runs()
    report(runs.rows(sys.argv[1:]), OUT)
    return int(runs.has_failed)


if __name__ == "__main__":
    sys.exit(main())
