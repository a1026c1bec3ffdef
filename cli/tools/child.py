"""One daemon as a child process: start, JSON events on standard output, log lines on standard error, stop."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Protocol

from kvstore.protocol.errors import Broken, ConfigError, DeadlineExceeded

MISUSE_STATUS: Final = 2
"""Exit status of a daemon with invalid settings."""
ERROR_LINE: Final = re.compile(r"kvstore-\w+: error: (.*)")
"""Line that a daemon prints before it exits with an error."""
STOP_DEADLINE_S: Final = 20.0
"""Added to the time that the daemon announced for its shutdown (`stop_s` of its events)."""
_LAUNCHER: Final = Path(__file__).with_name("launch.py")


class ProcessHandle(Protocol):
    """The part of `subprocess.Popen[str]` that a Child uses."""

    @property
    def pid(self) -> int: ...
    @property
    def stdout(self) -> IO[str] | None: ...
    @property
    def stderr(self) -> IO[str] | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def launched(module: str, arguments: Sequence[str], *, environment: Mapping[str, str]) -> ProcessHandle:
    """Start the module as a process of its own process group. It gets SIGTERM when the calling thread ends."""
    program = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), *program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        process_group=0,
    )


OnLog = Callable[[str, str], None]
"""Called with (name of the child, line of its standard error) in the child's log thread."""


class Child:
    """A running daemon. The daemon gets SIGTERM when the thread that created the Child ends, so that thread must outlive it.

    The daemon has its own process group: Ctrl-C reaches only the parent, which stops its children in the right order. Two reader threads
    collect events and log lines.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        on_log: OnLog,
        on_end: Callable[["Child"], None],
        start: Callable[..., ProcessHandle] = launched,
    ) -> None:
        """Starts the process. `on_end` is called in a reader thread when the process has ended, for any reason."""
        self.name = name
        self._on_log = on_log
        self._on_end = on_end
        self._last_line = self._error = ""
        self._is_stopping = False
        self._facts: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._ended = False
        self._process = start(module, arguments, environment=environment)
        self._log_reader = threading.Thread(target=self._read_log, name=f"{name}-log", daemon=True)
        self._reader = threading.Thread(target=self._read_facts, name=f"{name}-facts", daemon=True)
        self._log_reader.start()
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def facts(self, event: str, *, deadline_s: float) -> dict[str, Any]:
        """Wait for the JSON line {"event": event, ...}. Raises ConfigError or Broken if the process ends first, DeadlineExceeded."""
        with self._changed:
            self._changed.wait_for(lambda: event in self._facts or self._ended, deadline_s)
            if event in self._facts:
                return self._facts[event]
            if not self._ended:
                raise DeadlineExceeded(f"{self.name} is not {event} after {deadline_s:g} s")
        raise self.failure()

    def failure(self) -> ConfigError | Broken:
        """Wait for the end of the process and return its cause: the daemon's error line, or the signal."""
        status = self._process.wait()
        message = self._error or self._last_line
        if status == MISUSE_STATUS:
            return ConfigError(f"{self.name}: {message}")
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return Broken(f"{self.name} (pid {self.pid}) {how}" + (f": {message}" if message and status > 0 else ""))

    def terminate(self) -> None:
        """Send SIGTERM once. A second SIGTERM would make a node exit without saving its blocks."""
        if not self._is_stopping:
            self._is_stopping = True
            self._process.terminate()

    def stop(self, deadline_s: float | None = None) -> bool:
        """Send SIGTERM, and SIGKILL after the deadline; False if SIGKILL was needed.

        None: STOP_DEADLINE_S plus the time that the daemon announced.
        """
        self.terminate()
        try:
            self._process.wait(STOP_DEADLINE_S + self._stop_s() if deadline_s is None else deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        self._close()
        return True

    def _stop_s(self) -> float:
        with self._changed:
            announced = [facts.get("stop_s", 0) for facts in self._facts.values()]
        return max((float(seconds) for seconds in announced if isinstance(seconds, (int, float))), default=0.0)

    def kill(self) -> None:
        """Send SIGKILL, as a simulated crash, and wait for the end."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        for reader, stream in ((self._reader, self._process.stdout), (self._log_reader, self._process.stderr)):
            reader.join()
            assert stream is not None
            stream.close()

    def _read_facts(self) -> None:
        for line in _lines(self._process.stdout):
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                facts = json.loads(line)
                event = facts.get("event") or ("ready" if facts.get("ready") else "")
                with self._changed:
                    self._facts[event] = facts
                    self._changed.notify_all()
        self._process.wait()
        self._log_reader.join()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._on_end(self)

    def _read_log(self) -> None:
        for line in _lines(self._process.stderr):
            self._last_line = line
            if match := ERROR_LINE.fullmatch(line):
                self._error = match[1]  # reported by `failure`, so not logged as well
            else:
                self._on_log(self.name, line)


def _lines(stream: IO[str] | None) -> Iterator[str]:
    assert stream is not None
    return (line.rstrip("\n") for line in stream)
