"""Mooncake's own stress test as a program: `python -m benchmarks.engines.stress_child MASTER`, with the `mooncake` on its path.

Threads put objects, wait for one another, and get them: the shape of test_concurrent_stress_with_barrier of Mooncake's tests. Prints the
seconds that all puts and all gets took, of each round.
"""

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

THREADS: Final = 8
OBJECTS: Final = 100
OBJECT_BYTES: Final = 1 << 20
ROUNDS: Final = 3
SEGMENT_BYTES: Final = 3200 << 20


def main(master: str) -> None:
    store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    if status := store.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT_BYTES, 512 << 20, "tcp", "", master):
        raise RuntimeError(f"the store was not set up: {status}")
    values = [os.urandom(OBJECT_BYTES) for _ in range(THREADS)]
    rounds = []
    for number in range(ROUNDS):

        def put(thread: int, number: int = number) -> bool:
            return all(store.put(f"{number} {thread} {at}", values[thread]) == 0 for at in range(OBJECTS))

        def get(thread: int, number: int = number) -> bool:
            return all(store.get(f"{number} {thread} {at}") == values[thread] for at in range(OBJECTS))

        rounds.append([timed(put), timed(get)])
        store.remove_all(True)
    print(json.dumps(rounds), flush=True)
    os._exit(0)  # what the store's threads do at the interpreter's end is not measured


def timed(work: Callable[[int], bool]) -> float:
    """Seconds until all threads have done it. Raises RuntimeError if one came to nothing."""
    results = [False] * THREADS
    begin = threading.Barrier(THREADS + 1)

    def run(thread: int) -> None:
        begin.wait()
        results[thread] = work(thread)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    begin.wait()
    begun = time.perf_counter()
    for thread in threads:
        thread.join()
    if not all(results):
        raise RuntimeError("an object was not stored, or is not what was put")
    return time.perf_counter() - begun


if __name__ == "__main__":
    main(sys.argv[1])
