"""Send and receive without letting go of the GIL, for a thread beside which another one computes (gil_contention.py).

The methods of Python's sockets let go of it even where they wait for nothing. Whatever is out of the ordinary is left to them.
"""

import ctypes
import select
import socket
import struct
from typing import Final

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
