"""Memory back to the system: malloc keeps what is freed, and a node that once had many values on their way would keep their room."""

import ctypes


def trim_heap() -> None:
    """Give the free pages of the heap back, where the C library can (glibc). Some milliseconds for 256 MiB, without the GIL."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
