"""Whether another thread of this process computes in Python, so that each call that lets go of the GIL waits to get it back.

`send_held` and `receive_held` keep the GIL, for use beside such a thread.

Beside such a thread the GIL comes back after the interpreter's switch interval, 5 ms: a copy of 0.1 ms without the GIL takes 5.1 ms. A copy
with the GIL takes 0.1 ms, and stops the other thread for as long, a fiftieth of what that takes for itself at a time. Without such a
thread copies are better made without the GIL, since threads copy side by side then.

So calls without the GIL are probes. One that was late by more than its own work has the next ones made with the GIL:
- of a copy that is its time less the processor time of its thread;
- of a wait for an answer it is all of its time, if the thread slept twice: for the answer, and then for the GIL. That is looked at once a
  wait before it was long.

While other threads wait for answers of the same client, nothing is made with the GIL: it is they who take it, and all would wait for one.
"""

import ctypes
import resource
import select
import socket
import struct
from typing import Final

LATE_NS: Final = 2_000_000
"""More than a busy machine takes the processor away for, less than the switch interval."""
FIRST_HELD: Final = 32
MAX_HELD: Final = 512
"""Calls with the GIL after a late one, before the next probe: from the first to the last it doubles with each late probe in a row."""
HELD_WAIT_MS: Final = 1
"""A wait with the GIL is no longer."""
_AT_ONCE: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_POLL: Final = struct.Struct("ihh")
"""pollfd of poll(2): descriptor, events, events that are there."""
_libc = ctypes.PyDLL(None)
"""Calls of a PyDLL keep the GIL."""
_send, _receive, _poll = _libc.send, _libc.recv, _libc.poll
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_receive.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_poll.argtypes = (ctypes.c_char_p, ctypes.c_ulong, ctypes.c_int)
_send.restype = _receive.restype = ctypes.c_ssize_t


class GilContention:
    """What the threads of a client learn from their calls. No lock: what threads overwrite of one another is a guess less."""

    __slots__ = ("_held", "_left", "is_suspected", "waiting")

    def __init__(self) -> None:
        self.is_suspected = False
        """A wait took long, and nobody knows why: `sleeps` is to be asked before the next one, which costs more than most waits may."""
        self.waiting: set[int] = set()
        """A number for each wait under way without the GIL. A set, since a count would need a lock."""
        self._left = 0
        self._held = FIRST_HELD

    @property
    def is_on(self) -> bool:
        """Whether another thread computes, as far as is known."""
        return self._left > 0 and not self.waiting

    def holds(self) -> bool:
        """Whether the next call is to be made with the GIL. Once for each."""
        if self._left <= 0 or self.waiting:
            return False
        self._left -= 1
        return True

    def copied(self, late_ns: int) -> None:
        """A copy without the GIL took so much longer than its thread's processor time."""
        if late_ns >= LATE_NS:
            self._was_late()

    def waited(self, slept: int) -> None:
        """A wait of LATE_NS or more is over. `slept`: what `sleeps` said before it, 0 if it was not asked."""
        self.is_suspected = not slept
        if slept and sleeps() - slept > 1:
            self._was_late()

    def missed(self) -> None:
        """An answer was not there after HELD_WAIT_MS: waits are too long to be made with the GIL, before another probe says so."""
        self._left, self._held = 0, FIRST_HELD

    def _was_late(self) -> None:
        self._left, self._held = self._held, min(2 * self._held, MAX_HELD)


def sleeps() -> int:
    """How often this thread has slept so far: its voluntary context switches."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def send_held(fd: int, data: bytes) -> int:
    """How many bytes the socket takes now; 0, too, where it is broken."""
    sent: int = _send(fd, data, len(data), _AT_ONCE)
    return max(0, sent)


def receive_held(fd: int, room: memoryview, wait_ms: int) -> int:
    """Sleep for `wait_ms` at most, and have bytes in the writable `room`: how many. 0: there are none, or the stream has ended.

    No other thread of Python runs meanwhile."""
    if _poll(_POLL.pack(fd, select.POLLIN, 0), 1, wait_ms) <= 0:
        return 0
    got: int = _receive(fd, ctypes.addressof(ctypes.c_char.from_buffer(room)), len(room), _AT_ONCE)
    return max(0, got)
