"""Memory of this process that is asked for by size and named by its address: pools of engines that let the store allocate them."""

import ctypes
import mmap
import threading


class MooncakeHostMemAllocator:
    """Whole pages, zeros at first. Thread-safe. What is not freed goes with the allocator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[mmap.mmap, ctypes.Array[ctypes.c_char]]] = {}

    def alloc(self, size: int) -> int:
        """An address, 0 if there is no memory."""
        try:
            pages = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError):
            return 0
        view = (ctypes.c_char * size).from_buffer(pages)
        address = ctypes.addressof(view)
        with self._lock:
            self._held[address] = pages, view
        return address

    def free(self, ptr: int) -> int:
        """0; -1 for what was not allocated here. Nothing may use the memory any more."""
        with self._lock:
            found = self._held.pop(ptr, None)
        if found is None:
            return -1
        pages, view = found
        del found, view
        pages.close()
        return 0
