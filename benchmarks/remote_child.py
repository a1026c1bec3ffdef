"""A client of other hosts' nodes as a process, for remote.py: answers its questions, a line of JSON each. And a peer of bare frames.

`python -m benchmarks.remote_child client MASTER`, `... redis HOST:PORT` or `... frames HOST:PORT`. Values are made from their keys, and so
can be checked.
"""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import redis
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.protocol.errors import Unavailable
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.node_messages import AbortPuts
from kvstore.protocol.session_messages import ROLE_CLIENT, SERVER_NODE, Hello, Ok, Welcome
from kvstore.rpc.address import parse_address
from kvstore.rpc.busy_poll import BusyPoll
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.server import ConnectionLimits, Server
from kvstore.rpc.server.session import Session
from kvstore.transfer.config import TransferSettings

Blocks = NDArray[np.uint8]
"""Values, a row each."""
START_S: Final = 30.0
SMALL_BYTES: Final = 4096
PUT_BATCH: Final = 16
"""The master keeps a batch together: so few blocks that all nodes get some."""


class Asker:
    """A client that reaches nodes as those of other hosts: their sockets are on this machine's one file system."""

    def __init__(self, master: str) -> None:
        self._client = Client(master, deadline_s=60, transfer=TransferSettings(transports="tcp"))
        self._count = 0
        self._arrays: dict[str, Blocks] = {}

    def put(self, prefix: str, count: int, block_bytes: int) -> list[tuple[str, str]]:
        """Put so many blocks, wherever the master wants them: (key, name of its node) of each."""
        keys = [f"{prefix}-{i}" for i in range(count)]
        for start in range(0, count, PUT_BATCH):
            part = [key.encode() for key in keys[start : start + PUT_BATCH]]
            values = [value_of(key, block_bytes) for key in part]
            until_s = time.monotonic() + START_S
            while True:
                try:
                    self._client.put_batch(part, values)
                    break
                except Unavailable:
                    if time.monotonic() > until_s:
                        raise
        found = self._client.locate([key.encode() for key in keys])
        return [(key, places[0].node) for key, places in zip(keys, found, strict=True)]

    def read(self, keys: Sequence[str], block_bytes: int, seconds: float) -> dict[str, float]:
        """Batches of these for about so long: bytes and seconds. Afterwards every byte of the last one is compared."""
        wanted = [key.encode() for key in keys]
        buffers = [np.empty(block_bytes, np.uint8) for _ in keys]
        self._client.get_batch_into(wanted, buffers)  # connecting is not what is measured
        batches, begun_s = 0, time.monotonic()
        while (taken_s := time.monotonic() - begun_s) < seconds:
            assert None not in self._client.get_batch_into(wanted, buffers)
            batches += 1
        wrong = sum(bytes(buffer) != value_of(key, block_bytes) for key, buffer in zip(wanted, buffers, strict=True))
        return {"bytes": batches * len(keys) * block_bytes, "seconds": taken_s, "wrong": wrong}

    def latency(self, key: str, block_bytes: int, calls: int) -> list[float]:
        """Of single gets, in us."""
        buffer, name = np.empty(block_bytes, np.uint8), key.encode()
        taken = []
        for _ in range(calls):
            begun_ns = time.perf_counter_ns()
            self._client.get_into(name, buffer)
            taken.append((time.perf_counter_ns() - begun_ns) / 1e3)
        assert bytes(buffer) == value_of(name, block_bytes)
        return taken

    def frames(self, address: str, calls: int) -> list[float]:
        """Round trips of frames with next to no body to `serve_frames`, in us."""
        hello, deadline = Hello(ROLE_CLIENT), Deadline(START_S)
        channel = Channel.open(parse_address(address), hello, deadline)
        taken = []
        for _ in range(calls):
            begun_ns = time.perf_counter_ns()
            channel.call(hello, Welcome, deadline)
            taken.append((time.perf_counter_ns() - begun_ns) / 1e3)
        channel.close()
        return taken

    def node_frames(self, address: str, calls: int) -> list[float]:
        """Round trips of frames of a few bytes to a node, which has nothing to do for them, in us."""
        hello, deadline = Hello(ROLE_CLIENT), Deadline(START_S)
        channel = Channel.open(parse_address(address), hello, deadline, busy_poll=BusyPoll(ClientSettings().busy_poll_us))
        taken = []
        for _ in range(calls):
            begun_ns = time.perf_counter_ns()
            channel.call(AbortPuts([]), Ok, deadline)
            taken.append((time.perf_counter_ns() - begun_ns) / 1e3)
        channel.close()
        return taken

    def put_latency(self, calls: int) -> list[float]:
        """Of single puts of 4 KiB, new keys each, in us; their bytes are read once the last one is known to the cluster."""
        keys = self._fresh_keys(calls)
        values = [value_of(key, SMALL_BYTES) for key in keys]
        taken = []
        for key, value in zip(keys, values, strict=True):
            begun_ns = time.perf_counter_ns()
            self._client.put(key, value)
            taken.append((time.perf_counter_ns() - begun_ns) / 1e3)
        self._client.flush()
        assert self._client.get_batch(keys) == values, "wrong bytes"
        return taken

    def put_rate(self, blocks: int, block_bytes: int, seconds: float) -> float:
        """Bytes a second of batches put for about so long; the bytes of the last one are compared."""
        source = self._blocks("source", blocks, block_bytes)
        batches, begun_s = 0, time.perf_counter()
        while (taken_s := time.perf_counter() - begun_s) < seconds:
            keys = self._fresh_keys(blocks)
            assert all(self._client.put_batch(keys, source)), "not stored"
            batches += 1
        self._compare(keys, source)
        return batches * blocks * block_bytes / taken_s

    def get_rate(self, blocks: int, block_bytes: int, seconds: float) -> float:
        """Bytes a second of batches read for about so long; the bytes of the last one are compared."""
        source, sink = self._blocks("source", blocks, block_bytes), self._blocks("sink", blocks, block_bytes)
        keys = self._fresh_keys(blocks)
        assert all(self._client.put_batch(keys, source)), "not stored"
        batches, begun_s = 0, time.perf_counter()
        while (taken_s := time.perf_counter() - begun_s) < seconds:
            assert None not in self._client.get_batch_into(keys, sink)
            batches += 1
        self._compare(keys, source)
        return batches * blocks * block_bytes / taken_s

    def _compare(self, keys: Sequence[bytes], source: Blocks) -> None:
        sink = self._blocks("sink", *source.shape)
        sink.fill(0)
        self._client.get_batch_into(keys, sink)
        assert np.array_equal(source, sink), "wrong bytes"

    def _fresh_keys(self, count: int) -> list[bytes]:
        self._count += count
        return [b"block-%d" % (self._count - i) for i in range(count)]

    def _blocks(self, name: str, blocks: int, block_bytes: int) -> Blocks:
        """Memory with random bytes, made once."""
        if name not in self._arrays:
            self._arrays[name] = np.random.default_rng(len(self._arrays)).integers(0, 256, (blocks, block_bytes), np.uint8)
        return self._arrays[name]


class RedisAsker:
    """A client of Redis, over TCP."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._redis = redis.Redis(host=host, port=int(port))
        self._redis.ping()

    def put_latency(self, calls: int) -> list[float]:
        """As of Asker."""
        values = [(b"small-%d" % i, value_of(b"%d" % i, SMALL_BYTES)) for i in range(calls)]
        taken = []
        for key, value in values:
            begun_ns = time.perf_counter_ns()
            self._redis.set(key, value)
            taken.append((time.perf_counter_ns() - begun_ns) / 1e3)
        self._redis.flushall()
        return taken


def value_of(key: bytes, size_bytes: int) -> bytes:
    return hashlib.shake_128(key).digest(1024) * (size_bytes // 1024)


class Frames:
    """Answers each frame with one, and does nothing else: what our reactor, sockets and the network between take."""

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        session.context = self
        session.reply(header.request_id, Welcome(SERVER_NODE, "frames"))

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> "list[memoryview] | None":
        raise AssertionError("bare frames have none")

    def closed(self, session: Session) -> None:
        pass


def serve_frames(address: str) -> None:
    reactor = Reactor()
    server = Server(reactor, Frames(), ConnectionLimits(8))
    host, _, port = address.rpartition(":")
    print(json.dumps(server.listen_tcp(host, int(port))), flush=True)
    reactor.run()


def answer(asker: Asker | RedisAsker, question: dict[str, Any]) -> Any:
    return getattr(asker, question.pop("what"))(**question)


def main(role: str, address: str) -> None:
    if role == "frames":
        serve_frames(address)
    asker = RedisAsker(address) if role == "redis" else Asker(address)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(asker, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
