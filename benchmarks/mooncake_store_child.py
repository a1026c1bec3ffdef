"""Mooncake's store over TCP as processes, for remote_puts.py: `python -m benchmarks.mooncake_store_child storage|client HOST MASTER`.

`storage` lends memory to the cluster; `client` lends none and answers questions, a line of JSON each, so that all it puts crosses the
wire. Runs in Mooncake's own environment, so it needs nothing but numpy.
"""

import importlib
import json
import sys
import time
from typing import Any, Final

import numpy as np

SEGMENT_BYTES: Final = 2 << 30
"""Space for objects that were read: they are leased, cannot be removed, and stay until they are evicted."""
LOCAL_BYTES: Final = 256 << 20
SMALL_BYTES: Final = 4096


class MooncakeClient:
    """A process that takes part in Mooncake's store."""

    def __init__(self, host: str, master: str, segment_bytes: int) -> None:
        """Raises RuntimeError: the store did not start."""
        self._store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        if status := self._store.setup(host, "P2PHANDSHAKE", segment_bytes, LOCAL_BYTES, "tcp", "", master):
            raise RuntimeError(f"Mooncake's store did not start: status {status}")
        self._count = 0
        self._buffers: dict[str, Any] = {}

    def put_latency(self, calls: int) -> list[float]:
        """Microseconds of each put of 4 KiB."""
        value = bytes(SMALL_BYTES)
        keys = [f"small-{self._count + i}" for i in range(calls)]
        self._count += calls
        taken = []
        for key in keys:
            begun_ns = time.perf_counter_ns()
            status = self._store.put(key, value)
            taken.append((time.perf_counter_ns() - begun_ns) / 1e3)
            assert not status, f"put failed: status {status}"
        for key in keys:
            self._store.remove(key)
        return taken

    def put_rate(self, blocks: int, block_bytes: int, seconds: float) -> float:
        """Bytes a second of batches put for about so long."""
        source = self._buffer("source", blocks, block_bytes)
        sizes = [block_bytes] * blocks
        batches, taken_s = 0, 0.0
        while taken_s < seconds:
            keys = self._keys(blocks)
            begun_s = time.perf_counter()
            statuses = self._store.batch_put_from(keys, [row.ctypes.data for row in source], sizes)
            taken_s += time.perf_counter() - begun_s
            batches += 1
            assert not any(statuses), f"put failed: {statuses}"
            for key in keys:
                self._store.remove(key)
        return batches * blocks * block_bytes / taken_s

    def get_rate(self, blocks: int, block_bytes: int, seconds: float) -> float:
        """Bytes a second of batches read for about so long; the bytes of the last one are compared."""
        source, sink = self._buffer("source", blocks, block_bytes), self._buffer("sink", blocks, block_bytes)
        sizes, keys = [block_bytes] * blocks, self._keys(blocks)
        assert not any(self._store.batch_put_from(keys, [row.ctypes.data for row in source], sizes))
        batches, begun_s = 0, time.perf_counter()
        while (taken_s := time.perf_counter() - begun_s) < seconds:
            assert self._store.batch_get_into(keys, [row.ctypes.data for row in sink], sizes) == sizes
            batches += 1
        assert np.array_equal(source, sink), "wrong bytes"
        return batches * blocks * block_bytes / taken_s

    def _keys(self, count: int) -> list[str]:
        self._count += count
        return [f"block-{self._count - i}" for i in range(count)]

    def _buffer(self, name: str, blocks: int, block_bytes: int) -> Any:
        """Registered memory with random bytes, made once."""
        if name not in self._buffers:
            made = np.random.default_rng(len(self._buffers)).integers(0, 256, (blocks, block_bytes), np.uint8)
            assert not self._store.register_buffer(made.ctypes.data, made.nbytes)
            self._buffers[name] = made
        return self._buffers[name]


def main(role: str, host: str, master: str) -> None:
    client = MooncakeClient(host, master, SEGMENT_BYTES if role == "storage" else 0)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(getattr(client, question.pop("what"))(**question)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
