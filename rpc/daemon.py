"""What a daemon's process does around its reactor: logs, lines for its starter, signals, how memory is
allocated, and a collector that leaves what stays alone.

It knows neither settings nor what is served.
"""

import ctypes
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

from kvstore.rpc.reactor import Reactor

MAPPED_BYTES: Final = 1 << 20
_M_MMAP_THRESHOLD: Final = -3
"""Of glibc's malloc.h."""

log = logging.getLogger("kvstore.transfer")


def begin_logging() -> None:
    """Log to standard error; standard output is for `say`."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")


def map_large_arrays() -> None:
    """Have malloc map each allocation of MAPPED_BYTES or more by itself, whatever was freed before: an array that grows is then moved by
    its pages, and leaves no hole in the heap. A node of a million blocks had 50 MB of them. Nothing where the C library has no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def stop_on_signals(reactor: Reactor, ask_to_end: Callable[[], None] | None = None) -> list[str]:
    """As `end_on_signals`, of the reactor's `run`: by `ask_to_end`, called in the loop at the first signal, and at once at the second.
    None: at once at the first."""
    asked = ask_to_end is None

    def end() -> None:
        nonlocal asked
        if asked or ask_to_end is None:
            reactor.stop()
        else:
            asked = True
            reactor.call_soon(ask_to_end)

    return end_on_signals(end)


def end_on_signals(end: Callable[[], None]) -> list[str]:
    """Have SIGTERM and SIGINT call `end`, which may happen within any instruction. For the main thread. The names of those that came are in
    the list, which is the caller's to read."""
    came = list[str]()

    def on_signal(number: int, _frame: object) -> None:
        came.append(signal.Signals(number).name)
        end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return came


def on_hangup(act: Callable[[], None] | None) -> None:
    """Have SIGHUP, which would end the process, call `act` instead; None: nothing. For the main thread; a loop's `call_soon` will do."""
    signal.signal(signal.SIGHUP, (lambda *_: act()) if act is not None else signal.SIG_IGN)


def say(event: str, facts: dict[str, Any]) -> None:
    """One JSON line on standard output for the starter. That it has none, that nobody listens any more, or that it cannot be written, be
    it that the disk is full or the terminal gone, is no reason to stop: a master says a line at each take-over."""
    if sys.stdout is None:  # closed by who started it
        return
    try:
        # Its end is in the same write: `print` makes a second one where Python does not buffer, and daemons may share the file.
        sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes standard output at its end, and would make the failure its exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        log.warning("standard output cannot be written, and nothing is said there any more: %s", error.strerror)


def serve(reactor: Reactor) -> None:
    """Run the reactor until it is stopped. What is alive now stays: the collector need not walk a table of millions again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    reactor.run()
