"""Process setup of a daemon: logging, event lines on standard output, signals, malloc and the garbage collector."""

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
    """Log to standard error; standard output is for `announce`."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")


def map_large_arrays() -> None:
    """Have malloc map each allocation of MAPPED_BYTES or more separately; without mallopt in the C library, do nothing.

    A growing array is then moved by remapping its pages and leaves no hole in the heap: 50 MB in a node of a million
    blocks.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def stop_on_signals(reactor: Reactor, ask_to_end: Callable[[], None] | None = None) -> list[str]:
    """As `end_on_signals`, for the reactor: the first signal calls `ask_to_end` in the loop, the second stops the
    reactor.

    Without `ask_to_end` the first signal stops it.
    """
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
    """Have SIGTERM and SIGINT call `end`, between any two instructions of the main thread, which must be the caller.

    Return a list to which the names of received signals are appended.
    """
    came = list[str]()

    def on_signal(number: int, _frame: object) -> None:
        came.append(signal.Signals(number).name)
        end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return came


def on_sighup(act: Callable[[], None] | None) -> None:
    """Have SIGHUP, which would end the process, call `act`, or ignore it for None. For the main thread."""
    signal.signal(signal.SIGHUP, (lambda *_: act()) if act is not None else signal.SIG_IGN)


def announce(event: str, facts: dict[str, Any]) -> None:
    """Write one JSON line to standard output, for the parent process.

    A failed write is logged and does not end the daemon.
    """
    if sys.stdout is None:  # closed by the parent process
        return
    try:
        # One write with the newline: unbuffered `print` makes two, and daemons may share the file.
        sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes standard output at exit, and would turn the failure into its exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        log.warning("standard output cannot be written, further events are not printed: %s", error.strerror)


def serve(reactor: Reactor) -> None:
    """Run the reactor until it is stopped.

    Freezes current objects, so that the collector does not walk tables of millions.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    reactor.run()
