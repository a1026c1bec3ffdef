"""Fail points: named steps of the product's code at which a process kills itself, stops or is delayed.

The product has no branches for them and does not import this module. A step is a function of a class. It is wrapped only in the process in
which its point is armed, and only while it is armed, so a disarmed point costs nothing. A point whose function was removed or renamed
cannot be armed; test_walk.py arms each.

The file that FAIL_POINTS_FILE names has a number and the actions of a process, and may change while it runs: POINT=ACTION, comma separated.

    kill:3      SIGKILL to itself, at the third passage from now on; `kill` alone: at the first.
    stop        SIGSTOP to itself.
    delay:0.5   Delay each passage by so many seconds, in any thread.

The environment names the file and not the points, since it cannot be changed from outside. FILE.armed contains the armed text, FILE.struck
a line for each point that struck. Devices fail in the kernel instead (devices.py).
"""

import functools
import inspect
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

ENVIRONMENT: Final = "FAIL_POINTS_FILE"
POLL_S: Final = 0.02
"""Interval at which a process checks its file for changes."""
_END_OF_NUMBER: Final = ":"
SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Point:
    """A step: before `target` (MODULE:CLASS.FUNCTION) is called or, `is_after`, when it has returned; of the calls that `where` is true of,
    by their arguments, `self` included."""

    target: str
    is_after: bool = False
    where: Callable[..., bool] | None = None

    def owner(self) -> tuple[type, str]:
        """The class and the function's name. Raises AttributeError, ImportError, TypeError: it is no function of that class."""
        module, _, path = self.target.partition(":")
        name, _, attribute = path.partition(".")
        owner: type = getattr(import_module(module), name)
        function = inspect.getattr_static(owner, attribute)
        if not inspect.isfunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"{self.target} is no plain function")
        return owner, attribute


class Armed:
    """A point and what is to happen there. Thread-safe."""

    def __init__(self, name: str, point: Point, action: str, *, on_strike: Callable[[str], None]) -> None:
        """Raises ValueError for an action that is none."""
        self.point = point
        self._name = name
        self._on_strike = on_strike
        kind, _, argument = action.partition(":")
        if kind not in (*SIGNALS, "delay"):
            raise ValueError(f"{action!r}: an action is kill, stop or delay")
        self._signal = SIGNALS.get(kind)
        self._delay_s = float(argument) if kind == "delay" else 0.0
        self._left = int(argument or 1) if self._signal else 1
        self._is_off = False
        self._lock = threading.Lock()

    def end(self) -> None:
        """It strikes no more, nor a call that is under way."""
        with self._lock:
            self._is_off = True

    def passed(self, arguments: tuple[Any, ...]) -> None:
        if self.point.where is not None and not self.point.where(*arguments):
            return
        with self._lock:
            if self._is_off:
                return
            self._left -= self._signal is not None
            is_due = not self._left or self._signal is None
            if is_due:
                self._on_strike(self._name)
            if is_due and self._signal is not None:
                os.kill(os.getpid(), self._signal)
        time.sleep(self._delay_s)


class FailPoints:
    """The points of this process. Not thread-safe."""

    def __init__(self, points: Mapping[str, Point], *, on_strike: Callable[[str], None]) -> None:
        self._points = points
        self._on_strike = on_strike
        self._armed: list[Armed] = []
        self._originals: list[tuple[type, str, Any]] = []

    def arm(self, text: str) -> None:
        """In place of what was armed. Raises KeyError or ValueError for what is no point or no action; nothing is armed then."""
        wanted: dict[tuple[type, str], list[Armed]] = defaultdict(list)
        for item in filter(None, text.strip().split(",")):
            name, _, action = item.partition("=")
            armed = Armed(name, self._points[name], action, on_strike=self._on_strike)
            wanted[armed.point.owner()].append(armed)
        self.disarm()
        self._armed = [armed for here in wanted.values() for armed in here]
        for (owner, attribute), here in wanted.items():
            original = inspect.getattr_static(owner, attribute)
            self._originals.append((owner, attribute, original))
            setattr(owner, attribute, _wrapped(original, here))

    def disarm(self) -> None:
        """Every function is what it was."""
        for owner, attribute, original in self._originals:
            setattr(owner, attribute, original)
        self._originals.clear()
        for armed in self._armed:
            armed.end()


def _wrapped(function: Callable[..., Any], here: list[Armed]) -> Callable[..., Any]:
    before = [armed for armed in here if not armed.point.is_after]
    after = [armed for armed in here if armed.point.is_after]

    @functools.wraps(function)
    def stepped(*arguments: Any, **named: Any) -> Any:
        for armed in before:
            armed.passed(arguments)
        result = function(*arguments, **named)
        for armed in after:
            armed.passed(arguments)
        return result

    return stepped


# --- a process that a file controls ---


def watch(points: Mapping[str, Point]) -> None:
    """Arm the points in the file that this process's environment names, now and at every change. Without a file: a no-op."""
    path = os.environ.get(ENVIRONMENT)
    if path is None:
        return
    file = Path(path)

    def note_strike(name: str) -> None:
        with file.with_suffix(".struck").open("a") as struck:
            struck.write(f"{name}\n")

    here = FailPoints(points, on_strike=note_strike)
    armed = _take(here, file, "")

    def follow() -> None:
        known = armed
        while True:
            time.sleep(POLL_S)
            known = _take(here, file, known)

    threading.Thread(target=follow, name="fail-points", daemon=True).start()


def _take(here: FailPoints, file: Path, known: str) -> str:
    text = file.read_text() if file.exists() else ""
    if text != known:
        here.arm(text.partition(_END_OF_NUMBER)[2])
        _written(file.with_suffix(".armed"), text)
    return text


class Controlled:
    """The other side: what one process, which is given `environment`, is to do."""

    def __init__(self, file: Path) -> None:
        """`file` need not exist; its folder does."""
        self._file = file
        self._number = 0
        self.environment = {ENVIRONMENT: str(file)}

    def arm(self, text: str) -> None:
        """It is armed soon, see `is_armed`, and in a process that starts with this file before it does anything else."""
        self._file.with_suffix(".struck").unlink(missing_ok=True)
        self._tell(text)

    def disarm(self) -> None:
        """Nothing strikes any more once `is_armed`; what has struck until then stays known."""
        self._tell("")

    def _tell(self, text: str) -> None:
        """Under a new number, so that it is taken note of though it says what was said before."""
        self._number += 1
        _written(self._file, f"{self._number}{_END_OF_NUMBER}{text}")

    @property
    def is_armed(self) -> bool:
        """The process has taken note of the last `arm` or `disarm`."""
        armed = self._file.with_suffix(".armed")
        return armed.exists() and armed.read_text() == self._file.read_text()

    @property
    def struck(self) -> list[str]:
        """The points that struck since the last `arm`, in order."""
        struck = self._file.with_suffix(".struck")
        return struck.read_text().split() if struck.exists() else []


def _written(file: Path, text: str) -> None:
    """Whole, or not yet."""
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(text)
    part.replace(file)
