"""Single key presses from a terminal in cbreak mode; a context manager that restores the terminal."""

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Final

ENDED: Final = "ended"
KEYS: Final = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1b[1~": "home",
    b"\x1b[4~": "end",
}
"""Escape sequence -> name; other input is the character itself."""


class Keyboard:
    """Standard input, which must be a terminal. Not thread-safe."""

    def __init__(self) -> None:
        self._terminal = sys.stdin.fileno()

    def __enter__(self) -> "Keyboard":
        self._former = termios.tcgetattr(self._terminal)
        tty.setcbreak(self._terminal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._former)

    def wait(self, timeout_s: float) -> list[str]:
        """Wait for a key press or the timeout, and return the keys pressed; ENDED if the terminal is closed."""
        if not select.select([self._terminal], [], [], timeout_s)[0]:
            return []
        try:
            pressed = os.read(self._terminal, 1024)
        except OSError:
            pressed = b""
        return _keys(pressed) if pressed else [ENDED]


def _keys(pressed: bytes) -> list[str]:
    found = []
    while pressed:
        known = next((code for code in KEYS if pressed.startswith(code)), b"")
        if known:
            found.append(KEYS[known])
        elif pressed[0] != 0x1B:
            found.append(chr(pressed[0]))
        pressed = pressed[len(known) or 1 :]
    return found
