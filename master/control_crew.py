"""Threads that serve the calls of the control plane, and whom they wait for.

gRPC's own pool gives a thread to each call as soon as its headers are there, and has it wait for the message, and for each answer to be
taken: a handful of calls that say nothing more would be all that it serves. Here calls wait in lines (control_lines.py) until there is a
place, and one whose peer has a thread wait for too long is ended.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from kvstore.master.control_lines import Line, Lines
from kvstore.rpc.workers import started

SEND_TIMEOUT_S: Final = 30.0
"""Time that a peer has to take one message."""

log = logging.getLogger("kvstore.master")


class Cancellable(Protocol):
    """As far as a crew knows a grpc.ServicerContext."""

    def cancel(self) -> None: ...


class Crew:
    """See the module. Thread-safe."""

    def __init__(self, threads: int, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError: the system does not give so many threads."""
        self._lines = Lines[Callable[[], None]](threads)
        self._threads = started(threads, "control")
        self._lock = threading.Lock()
        self._clock_s = clock_s
        self._waits: dict[Cancellable, float] = {}
        """Whose peer a thread waits for, and until when."""
        self._is_closed = False

    def serve(self, line: Line, call: Callable[[], None]) -> None:
        """Have it called when its turn comes. Raises Full."""
        with self._lock:
            self._lines.add(line, call)
            self._begin()

    def _begin(self) -> None:
        """Give away the places that are free."""
        while not self._is_closed and (found := self._lines.next()) is not None:
            self._threads.submit(self._run, *found)

    def _run(self, line: Line, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            log.exception("a control call failed")
        finally:
            with self._lock:
                self._lines.done(line)
                self._begin()

    @contextmanager
    def waiting_for(self, context: Cancellable, patience_s: float) -> Iterator[None]:
        """This thread waits for the peer of that call, which is ended if it takes longer."""
        self._waits[context] = self._clock_s() + patience_s
        try:
            yield
        finally:
            self._waits.pop(context, None)

    def expire(self) -> int:
        """End the calls whose peers are waited for in vain; returns how many. To be called now and then."""
        now_s = self._clock_s()
        late = [context for context, until_s in list(self._waits.items()) if until_s <= now_s]
        for context in late:
            context.cancel()
        return len(late)

    def close(self) -> None:
        """Begin no more calls; those that are served end by themselves, or by the server's end."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=False)
