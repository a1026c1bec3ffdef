"""Checksums of what puts have brought: of small values at once, of large ones in threads, for a value of 64 MiB holds up a loop for 5 ms.

Whatever becomes of a put meanwhile, its slot is not free before its bytes have been read: memory of a slab that has gone may be cut off,
and who reads there dies.
"""

import os
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from kvstore.rpc.reactor import Reactor
from kvstore.rpc.thread_pools import started
from kvstore.store.block_table.open_puts import OpenPut

AT_ONCE_BYTES: Final = 256 << 10
"""Up to this much, some 20 us, the way to a thread and back takes longer than the work."""
MAX_THREADS: Final = 4


class _Reading:
    """The open_puts.Grant of a put that is being read: its slot is kept while it is."""

    def __init__(self) -> None:
        self.is_over = False

    def revoke(self) -> bool:
        return self.is_over


class ChecksumVerifier:
    """Owns the threads. The node's loop is the only caller."""

    def __init__(self, reactor: Reactor) -> None:
        """Raises ConfigError: there are not so many threads to be had."""
        self._reactor = reactor
        self._threads = started(min(MAX_THREADS, os.cpu_count() or 1), "checksums")

    def check(self, puts: Sequence[OpenPut], values: Sequence[memoryview], done: Callable[[Sequence[int]], None]) -> None:
        """Call `done` once in the loop with the xxh3_64 of each value, before this returns if they are small. Each lies in the slot of its
        put, which is open or has expired, and which nobody writes any more; by then they may be over, and their writer gone."""
        if sum(map(len, values)) <= AT_ONCE_BYTES:
            done(_sums(values))
            return
        reading = _Reading()
        for put in puts:
            put.grant = reading

        def work() -> None:
            sums = _sums(values)
            self._reactor.call_soon(lambda: over(sums))

        def over(sums: Sequence[int]) -> None:
            reading.is_over = True
            done(sums)

        self._threads.submit(work)

    def close(self) -> None:
        """Wait for what is at work; what has not begun is given up. To be called before the memory of the values goes."""
        self._threads.shutdown(cancel_futures=True)


def _sums(values: Sequence[memoryview]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(value) for value in values]
