"""One client that puts single values: `python -m benchmarks.puts_child kvstore|mooncake ADDRESS`.

Each line that it reads is a Task as JSON. It responds with a line of the seconds of each call. A thread of the same process may
compute in Python meanwhile, as an engine's does. Each task removes its values at its end. Mooncake's client has no memory of its own for
values: they go to another process of this host, as kvstore's go to its node.
"""

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

SOURCE_BYTES: Final = 64 << 20
"""Values are cut out of so much, one after the other, so that they are in no processor's cache, unless one is put again and again."""
BUFFER_BYTES: Final = 256 << 20
"""Memory that Mooncake registers for values in flight."""

Put = Callable[[str, bytes], Any]
Remove = Callable[[list[str]], Any]


def main(store: str, address: str) -> None:
    put, remove = opened(store, address)
    source = os.urandom(SOURCE_BYTES)
    print("ready", flush=True)
    for line in sys.stdin:
        task: dict[str, int] = json.loads(line)
        seconds, keys = timed(put, source, **task)
        remove(keys)
        print(json.dumps(seconds), flush=True)
    os._exit(0)  # what Mooncake's threads do at the interpreter's end is not measured


def opened(store: str, address: str) -> tuple[Put, Remove]:
    """Raises RuntimeError: Mooncake's client was not set up."""
    if store == "kvstore":
        client: Any = importlib.import_module("kvstore.client").Client(address)
        return lambda key, value: client.put(key.encode(), value), lambda keys: client.remove([key.encode() for key in keys])
    theirs: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    if status := theirs.setup("127.0.0.1", "P2PHANDSHAKE", 0, BUFFER_BYTES, "tcp", "", address):
        raise RuntimeError(f"the store was not set up: {status}")
    return lambda key, value: not theirs.put(key, value), lambda keys: theirs.remove_all(True)


def timed(put: Put, source: bytes, *, size_bytes: int, calls: int, computes: int, repeats: int) -> tuple[list[float], list[str]]:
    """Seconds of each call, and the keys. Raises RuntimeError if a value was not stored."""
    values = [source[at : at + size_bytes] for at in range(0, SOURCE_BYTES - size_bytes + 1, size_bytes)][: 1 if repeats else None]
    keys = [os.urandom(8).hex() for _ in range(calls)]
    seconds = []
    over = threading.Event()
    beside = threading.Thread(target=compute, args=(over,))
    if computes:
        beside.start()
    try:
        for number, key in enumerate(keys):
            value = values[number % len(values)]
            begun = time.perf_counter()
            is_stored = put(key, value)
            seconds.append(time.perf_counter() - begun)
            if not is_stored:
                raise RuntimeError("a value was not stored")
    finally:
        over.set()
        if computes:
            beside.join()
    return seconds, keys


def compute(over: threading.Event) -> None:
    """In Python: it has the GIL all the time that it runs."""
    while not over.is_set():
        sum(number * number for number in range(1000))


if __name__ == "__main__":
    main(*sys.argv[1:])
