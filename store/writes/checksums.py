"""Checksums of received values: small ones in the loop, large ones in threads, because a value of 64 MiB blocks the
loop for 5 ms.

A put's slot is not freed while its bytes are being read, however the put ends: the memory of a freed slab may be
truncated, and reading it would kill the process.
"""

import os
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from kvstore.rpc.reactor import Reactor
from kvstore.rpc.thread_pools import started
from kvstore.store.block_table.open_puts import OpenPut

AT_ONCE_BYTES: Final = 256 << 10
"""Up to this size (20 us) the hand-over to a thread takes longer than the work."""
MAX_THREADS: Final = 4


class _Reading:
    """WritePermission of a put that is being read; keeps its slot."""

    def __init__(self) -> None:
        self.is_over = False

    def revoke(self) -> bool:
        return self.is_over


class ChecksumVerifier:
    """Owns the checksum threads. Called from the node's loop."""

    def __init__(self, reactor: Reactor) -> None:
        """Raises ConfigError: the threads cannot be started."""
        self._reactor = reactor
        self._threads = started(min(MAX_THREADS, os.cpu_count() or 1), "checksums")

    def check(self, puts: Sequence[OpenPut], values: Sequence[memoryview], done: Callable[[Sequence[int]], None]) -> None:
        """Call `done` once in the loop with the xxh3_64 of each value; before returning if they are small. Each value
        is in the slot of its put, which is open or expired and no longer written. The puts may have ended by then."""
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
        """Wait for work in progress; queued work is dropped. Call it before the values' memory is unmapped."""
        self._threads.shutdown(cancel_futures=True)


def _sums(values: Sequence[memoryview]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(value) for value in values]
