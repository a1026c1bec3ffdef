"""One daemon as a child process: started, listened to, stopped. It knows daemons only by their module's name and their JSON lines."""

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
"""Exit status of a daemon whose settings cannot be met."""
LAST_WORDS: Final = re.compile(r"kvstore-\w+: error: (.*)")
"""What a daemon says when it ends because it cannot do what it was told."""
STOP_DEADLINE_S: Final = 20.0
"""On top of what the daemon said that it may need (`stop_s` of its first line)."""
_LAUNCHER: Final = Path(__file__).with_name("launch.py")


class ProcessHandle(Protocol):
    """What a Child needs of the process that it is told of: `subprocess.Popen[str]` has it."""

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
    """The module as a program that gets SIGTERM when the thread ends that calls this. It has a process group of its own."""
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
"""Called with (name of the child, line of its standard error) in a thread of the child's."""


class Child:
    """A running daemon. Start it in a thread that outlives it: the daemon gets SIGTERM when that thread ends, however it ends.

    It has a process group of its own, so that Ctrl-C reaches only the starter, which stops its children in the right order.
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
        """Starts it, by `start`. `on_end` is called, in a thread, when the process has ended for whatever reason."""
        self.name = name
        self._on_log = on_log
        self._on_end = on_end
        self._last_line = self._last_words = ""
        self._is_asked = False
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
        """Wait for the JSON line {"event": event, ...}. Raises ConfigError or Broken when it ends instead, DeadlineExceeded."""
        with self._changed:
            self._changed.wait_for(lambda: event in self._facts or self._ended, deadline_s)
            if event in self._facts:
                return self._facts[event]
            if not self._ended:
                raise DeadlineExceeded(f"{self.name} is not {event} after {deadline_s:g} s")
        raise self.failure()

    def failure(self) -> ConfigError | Broken:
        """Why it ended, once it has: its own last words, or the signal."""
        status = self._process.wait()
        said = self._last_words or self._last_line
        if status == MISUSE_STATUS:
            return ConfigError(f"{self.name}: {said}")
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return Broken(f"{self.name} (pid {self.pid}) {how}" + (f": {said}" if said and status > 0 else ""))

    def ask_to_stop(self) -> None:
        """SIGTERM, once: a second one has a node end at once, and what it was writing down is lost. One that has ended is left alone."""
        if not self._is_asked:
            self._is_asked = True
            self._process.terminate()

    def stop(self, deadline_s: float | None = None) -> bool:
        """As `ask_to_stop`, and SIGKILL when that does not end it in time: False then. None: STOP_DEADLINE_S and what it said that it may
        need."""
        self.ask_to_stop()
        try:
            self._process.wait(STOP_DEADLINE_S + self._stop_s() if deadline_s is None else deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        self._close()
        return True

    def _stop_s(self) -> float:
        with self._changed:
            told = [facts.get("stop_s", 0) for facts in self._facts.values()]
        return max((float(seconds) for seconds in told if isinstance(seconds, (int, float))), default=0.0)

    def kill(self) -> None:
        """SIGKILL, as a crash would be."""
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
            if match := LAST_WORDS.fullmatch(line):
                self._last_words = match[1]  # told by `failure`; once is enough
            else:
                self._on_log(self.name, line)


def _lines(stream: IO[str] | None) -> Iterator[str]:
    assert stream is not None
    return (line.rstrip("\n") for line in stream)
