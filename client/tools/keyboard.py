"""Keys of a terminal one by one, as they are pressed, and word of its new size; a context manager that leaves the terminal as it was."""

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from types import FrameType, TracebackType
from typing import Final

RESIZED: Final = "resized"
WOKEN: Final = "woken"
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
"""By what terminals send; all else is the character itself."""
_RESIZE: Final = b"r"


class Keyboard:
    """For the main thread, for it takes the signal SIGWINCH over; `wake` may be called by any."""

    def __init__(self, terminal: int | None = None) -> None:
        """Of the terminal with this descriptor; standard input for None."""
        self._terminal = sys.stdin.fileno() if terminal is None else terminal

    def __enter__(self) -> "Keyboard":
        self._former = termios.tcgetattr(self._terminal)
        self._notes, self._noted = os.pipe()
        os.set_blocking(self._noted, False)
        self._handler = signal.signal(signal.SIGWINCH, self._resized)
        tty.setcbreak(self._terminal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._former)
        signal.signal(signal.SIGWINCH, self._handler)
        os.close(self._notes)
        noted, self._noted = self._noted, -1
        os.close(noted)

    def wait(self) -> list[str]:
        """What has been pressed, or what else happened (RESIZED, WOKEN, ENDED: the terminal is gone); waits for it."""
        ready, _writable, _odd = select.select([self._terminal, self._notes], [], [])
        if self._notes in ready:
            return [RESIZED if _RESIZE in os.read(self._notes, 4096) else WOKEN]
        try:
            pressed = os.read(self._terminal, 1024)
        except OSError:
            pressed = b""
        return _keys(pressed) if pressed else [ENDED]

    def wake(self) -> None:
        """Have `wait` return."""
        self._note(b"w")

    def _resized(self, _number: int, _frame: FrameType | None) -> None:
        self._note(_RESIZE)

    def _note(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # full, or closed: whoever waits is awake, or gone
            os.write(self._noted, what)


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
