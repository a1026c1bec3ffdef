"""A client of other hosts' nodes as a process, for remote.py: answers its questions, a line of JSON each. And a peer of bare frames.

`python -m benchmarks.remote_child client MASTER` or `... frames HOST:PORT`. Values are made from their keys, and so can be checked.
"""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kvstore.client import Client
from kvstore.protocol.errors import Unavailable
from kvstore.protocol.frames import Header
from kvstore.protocol.session_messages import ROLE_CLIENT, SERVER_NODE, Hello, Welcome
from kvstore.rpc.address import parse_address
from kvstore.rpc.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server import Server
from kvstore.rpc.session import Session
from kvstore.transfer.config import TransferSettings

START_S: Final = 30.0
PUT_BATCH: Final = 16
"""The master keeps a batch together: so few blocks that all nodes get some."""


class Asker:
    """A client that reaches nodes as those of other hosts: their sockets are on this machine's one file system."""

    def __init__(self, master: str) -> None:
        self._client = Client(master, deadline_s=60, transfer=TransferSettings(transports="tcp"))

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


def value_of(key: bytes, size_bytes: int) -> bytes:
    return hashlib.shake_128(key).digest(1024) * (size_bytes // 1024)


class Frames:
    """Answers each frame with one, and does nothing else: what our reactor, sockets and the network between take."""

    def frame(self, session: Session, header: Header, body: memoryview) -> None:
        session.context = self
        session.reply(header.request_id, Welcome(SERVER_NODE, "frames"))

    def payload(self, session: Session, header: Header, body: memoryview) -> "list[memoryview] | None":
        raise AssertionError("bare frames have none")

    def closed(self, session: Session) -> None:
        pass


def serve_frames(address: str) -> None:
    reactor = Reactor()
    server = Server(reactor, Frames(), max_connections=8)
    host, _, port = address.rpartition(":")
    print(json.dumps(server.listen_tcp(host, int(port))), flush=True)
    reactor.run()


def answer(asker: Asker, question: dict[str, Any]) -> Any:
    return getattr(asker, question.pop("what"))(**question)


def main(role: str, address: str) -> None:
    if role == "frames":
        serve_frames(address)
    asker = Asker(address)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(asker, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
