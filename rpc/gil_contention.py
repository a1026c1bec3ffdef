"""Detection of GIL contention: another thread computes in Python, and calls that release the GIL wait to get it back.

`send_held` and `receive_held` keep the GIL, for use under contention.

Under contention a call gets the GIL back after the interpreter's switch interval, 5 ms: a copy of 0.1 ms takes 5.1 ms.
A copy that keeps the GIL takes 0.1 ms, and stops the other thread for a fiftieth of its interval. Without contention
copies should release the GIL, because threads then copy in parallel.

Calls that release the GIL are the probes. If one is late, the next ones keep the GIL. Lateness is

- for a copy, its duration less the processor time of its thread;
- for a wait for a response, its duration, if the thread slept twice, for the response and for the GIL. The count is
  taken only after a long wait.

While other threads of the client wait for responses, no call keeps the GIL: they are the contention, and all would wait
for one.
"""

import ctypes
import resource
import select
import socket
import struct
from typing import Final

LATE_NS: Final = 2_000_000
"""Lateness that counts as contention: longer than a preemption on a busy machine, shorter than the switch interval."""
FIRST_HELD: Final = 32
MAX_HELD: Final = 512
"""Calls that keep the GIL after a late probe; doubles from the first to the last with each late probe in a row."""
HELD_WAIT_MS: Final = 1
"""Longest wait that keeps the GIL."""
_AT_ONCE: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_POLL: Final = struct.Struct("ihh")
"""pollfd of poll(2): descriptor, requested events, returned events."""
_libc = ctypes.PyDLL(None)
"""Calls of a PyDLL keep the GIL."""
_send, _receive, _poll = _libc.send, _libc.recv, _libc.poll
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_receive.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_poll.argtypes = (ctypes.c_char_p, ctypes.c_ulong, ctypes.c_int)
_send.restype = _receive.restype = ctypes.c_ssize_t


class GilContention:
    """Contention estimate shared by a client's threads. Lock-free: a lost update only makes the estimate worse."""

    __slots__ = ("_held", "_left", "is_suspected", "waiting")

    def __init__(self) -> None:
        self.is_suspected = False
        """True if the last wait was long for an unknown reason: call `sleeps` before the next one. `sleeps` is too slow
        for every wait."""
        self.waiting: set[int] = set()
        """An id for each wait without the GIL. A set, because a count would need a lock."""
        self._left = 0
        self._held = FIRST_HELD

    @property
    def is_on(self) -> bool:
        """True if the GIL is contended, by the estimate."""
        return self._left > 0 and not self.waiting

    def holds(self) -> bool:
        """Return True if the next call should keep the GIL. Call this once per call, because it counts."""
        if self._left <= 0 or self.waiting:
            return False
        self._left -= 1
        return True

    def copied(self, late_ns: int) -> None:
        """Record a copy without the GIL that took `late_ns` longer than its thread's processor time."""
        if late_ns >= LATE_NS:
            self._was_late()

    def waited(self, slept: int) -> None:
        """Record a wait of LATE_NS or more. `slept`: `sleeps()` before it, 0 if not called."""
        self.is_suspected = not slept
        if slept and sleeps() - slept > 1:
            self._was_late()

    def missed(self) -> None:
        """Record a response that did not arrive within HELD_WAIT_MS: waits release the GIL until the next late probe."""
        self._left, self._held = 0, FIRST_HELD

    def _was_late(self) -> None:
        self._left, self._held = self._held, min(2 * self._held, MAX_HELD)


def sleeps() -> int:
    """Return how often this thread has slept: its voluntary context switches."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def send_held(fd: int, data: bytes) -> int:
    """Send what the socket takes now. Return how many bytes; 0 on a broken socket."""
    sent: int = _send(fd, data, len(data), _AT_ONCE)
    return max(0, sent)


def receive_held(fd: int, buffer: memoryview, wait_ms: int) -> int:
    """Wait for at most `wait_ms` and receive into `buffer`. Return how many bytes; 0: none, or the end of the stream.

    No other Python thread runs meanwhile.
    """
    if _poll(_POLL.pack(fd, select.POLLIN, 0), 1, wait_ms) <= 0:
        return 0
    got: int = _receive(fd, ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer), _AT_ONCE)
    return max(0, got)
