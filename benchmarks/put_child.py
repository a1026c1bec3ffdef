"""A process that puts values of 4 KiB for a given time: `python -m benchmarks.put_child kvstore|redis ADDRESS SECONDS THREADS`.

It prints a line once its connections are open, starts at a line of its input, and prints its counts as JSON.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable

from kvstore.cli.tools.bench import SMALL_BYTES
from kvstore.client import Client
from kvstore.protocol.errors import KVStoreError

Put = Callable[[bytes, bytes], object]
DEADLINE_S = 2.0


def main() -> None:
    store, address, seconds, threads = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    put = _connected(store, address)
    value = os.urandom(SMALL_BYTES)
    for _ in range(10):
        put(os.urandom(16), value)
    print("ready", flush=True)
    sys.stdin.readline()
    begun_ns = time.process_time_ns()
    writers = [_Writer(put, value, time.monotonic() + seconds) for _ in range(threads)]
    if threads == 1:
        writers[0].run()
    else:
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
    cpu_ns = time.process_time_ns() - begun_ns
    print(json.dumps({"puts": [writer.puts for writer in writers], "errors": sum(writer.errors for writer in writers), "cpu_ns": cpu_ns}))


class _Writer(threading.Thread):
    """Puts under new keys until the time is over, in the caller's thread by `run` or in one of its own."""

    def __init__(self, put: Put, value: bytes, end_s: float) -> None:
        super().__init__()
        self._put, self._value, self._end_s = put, value, end_s
        self.puts = self.errors = 0

    def run(self) -> None:
        put, value, end_s, clock_s = self._put, self._value, self._end_s, time.monotonic
        prefix, number = os.urandom(8), 0
        while clock_s() < end_s:
            number += 1
            try:
                put(prefix + number.to_bytes(8, "little"), value)
            except KVStoreError:
                self.errors += 1
        self.puts = number - self.errors


def _connected(store: str, address: str) -> Put:
    if store == "kvstore":
        return Client(address, deadline_s=DEADLINE_S).put
    import redis

    found: Put = redis.Redis(unix_socket_path=address).set
    return found


if __name__ == "__main__":
    main()
