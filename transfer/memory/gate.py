"""A gate between threads that use some memory and the one that answers for it: shut, it lets nobody in, and nobody is in any more.

Python runs signal handlers between the bytecodes of the main thread, and inside every wait of its own locks; a handler may raise there,
time and again. So the wait is one call of the C library, which no signal ends. Put first into a `finally` it cannot be missed either:
CPython looks for signals after calls, at jumps back and at the beginning of functions, and none of these lies before it.

Unlike shield.py it holds nothing back and can stand in a coroutine, and unlike handover/latch.py it waits for all who happen to be inside,
without a limit, rather than for one who says that it is over.
"""

import _thread
import ctypes
from collections.abc import Callable
from functools import partial
from typing import Final

_Lock: Final = ctypes.c_char * 256
"""More than a pthread_rwlock_t takes on any Linux: 56 bytes on x86-64."""

_libc = ctypes.CDLL(None)
_init, _enter, _shut, _leave = (getattr(_libc, f"pthread_rwlock_{name}") for name in ("init", "tryrdlock", "wrlock", "unlock"))
_init.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
for _function in (_enter, _shut, _leave):
    _function.argtypes = (ctypes.c_void_p,)


class Gate:
    """A reader-writer lock: readers are the threads inside, and the one write lock, never given back, shuts it.

    `shut()` waits, uninterruptibly and without the GIL, until all who entered have left; nobody enters afterwards. Once only, and from
    one thread. To hold whatever is raised it must be the first thing in a `finally`.
    """

    __slots__ = ("_address", "_lock", "shut")

    def __init__(self) -> None:
        self._lock = _Lock()
        self._address = ctypes.addressof(self._lock)
        _init(self._address, None)
        # A partial, since a method would be a function, at whose beginning a signal handler may raise.
        self.shut: Callable[[], object] = partial(_shut, self._address)

    def enter(self) -> bool:
        """Go inside; False if the gate is shut. It is left by one `leave`, in whichever thread: readers are counted, not known by theirs,
        in glibc as in musl."""
        return not _enter(self._address)

    def leave(self) -> None:
        _leave(self._address)

    def pass_through(self, work: Callable[[], None]) -> bool:
        """Do `work` inside; False, and nothing is done, if the gate is shut. For threads that see no signals: any but the main one."""
        if not self.enter():
            return False
        try:
            work()
        finally:
            self.leave()
        return True


def begin_thread(work: Callable[[], object]) -> None:
    """Do `work` in a thread that the interpreter's end does not wait for. One call of C: `threading.Thread.start` waits for the thread on
    a condition, which a signal handler that raises leaves with its lock taken or released twice."""
    _thread.start_new_thread(work, ())
