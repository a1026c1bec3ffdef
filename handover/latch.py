"""What a thread waits for until another one says so once, also when signal handlers raise in the thread that waits, time and again.

Python runs signal handlers between the bytecodes of the main thread, and inside each wait for its locks; a handler may raise there. Events
and conditions are no good to such a thread: struck within their own code they leave their lock taken, and who says so hangs. Here an
ordinary wait is a lock of its own, and `sit_out` one call of the C library, which no signal ends.

Unlike a gate (transfer/memory/gate.py) it has a limit, and waits that a signal may end; unlike a shield (shield.py, there) it also holds
where the caller is struck on the way out of the call that has begun a request.
"""

import ctypes
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

_LOCK_BYTES: Final = 256
"""More than a pthread_rwlock_t takes on any Linux: 56 bytes on x86-64."""

_LATEST_S: Final = float(1 << 40)
"""The end of a latch without a limit: 34,000 years."""


class _Time(ctypes.Structure):
    """struct timespec."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None)
for _function in (_libc.pthread_rwlock_rdlock, _libc.pthread_rwlock_unlock):
    _function.argtypes = (ctypes.c_void_p,)
for _function in (_libc.pthread_rwlock_init, _libc.pthread_rwlock_timedwrlock):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_IS_STEADY: Final = hasattr(_libc, "pthread_rwlock_clockwrlock")
"""The C library waits by a clock that nobody sets: glibc from 2.30 on. Elsewhere a step of the wall clock ends or prolongs a wait."""


class Latch:
    """See the module. Thread-safe. It is made shut, and opened once.

    `sit_out()` returns when it is open, or `limit_s` after it was made; until then nothing ends it, for it is to be called by who has been
    struck while he waited. First in a `finally` it cannot be missed: CPython looks for signals after calls, at jumps back and at the
    beginning of functions, and none of these lies before it.
    """

    __slots__ = ("_end", "_lock", "_waiting", "is_open", "sit_out")

    def __init__(self, limit_s: float) -> None:
        self.is_open = False
        self._waiting: list[threading.Lock] = []
        # Readers are counted, not known by their thread, in glibc as in musl: another one may unlock.
        self._lock = ctypes.create_string_buffer(_LOCK_BYTES)
        address = ctypes.addressof(self._lock)
        _libc.pthread_rwlock_init(address, None)
        _libc.pthread_rwlock_rdlock(address)
        if _IS_STEADY:
            now_s, wait = time.monotonic(), partial(_libc.pthread_rwlock_clockwrlock, ctypes.c_void_p(address), time.CLOCK_MONOTONIC)
        else:
            now_s, wait = time.time(), partial(_libc.pthread_rwlock_timedwrlock, address)
        parts_s, whole_s = math.modf(min(now_s + limit_s, _LATEST_S))
        self._end = _Time(int(whole_s), int(parts_s * 1e9))
        # A partial, since a method would be a function, at whose beginning a handler may raise.
        self.sit_out: Callable[[], object] = partial(wait, ctypes.c_void_p(ctypes.addressof(self._end)))

    def open(self) -> None:
        """Let all go on who wait. A second time is a no-op. For one thread, which no signal handler strikes."""
        if not self.is_open:
            self.is_open = True
            for waiting in list(self._waiting):
                waiting.release()
            _libc.pthread_rwlock_unlock(ctypes.addressof(self._lock))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is open, or the time is over; whether it is open. What a signal handler raises ends it."""
        if not self.is_open:
            waiting = threading.Lock()
            waiting.acquire()
            self._waiting.append(waiting)  # whoever opens it has marked it so before he looks at this list
            if not self.is_open and not waiting.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
                self._waiting.remove(waiting)
        return self.is_open
