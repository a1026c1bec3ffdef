"""An engine's KV events as vLLM's publisher sends them, from a test: what it loses is the test's choice."""

import threading
import time
from typing import Any

import msgspec
import zmq

END = b"\xff" * 8


class Publisher:
    """A context manager; both endpoints are bound on free ports."""

    def __init__(self, *, topics: bool = True) -> None:
        """`topics`: replays have a topic frame, as vLLM 0.32 and SGLang 0.5.23 send them; releases of 2025 sent none."""
        self._topic = (b"",) if topics else ()
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.XPUB)
        self._replay = self._context.socket(zmq.ROUTER)
        for socket in (self._events, self._replay):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind("tcp://127.0.0.1:0")
        self.endpoint = self._events.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self.number = 0
        self.kept: dict[int, bytes] = {}
        """Messages that can still be replayed, by sequence number."""
        self.asked: list[int] = []
        self._is_ending = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def await_subscriber(self) -> None:
        """Until there is one, what is published is lost."""
        while True:
            assert self._events.poll(60_000)
            if self._events.recv()[:1] == b"\1":
                return  # and no other's end

    def publish(self, *events: Any, is_lost: bool = False, is_kept: bool = True) -> None:
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        if is_kept:
            self.kept[self.number] = payload
        if not is_lost:
            self.send(self.number.to_bytes(8, "big"), payload)
        self.number += 1

    def send(self, *parts: bytes) -> None:
        self._events.send_multipart((b"", *parts))

    def begin_again(self) -> None:
        """Reset the numbers and the replay buffer, as a restarted engine does."""
        self.number, self.kept = 0, {}

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        self._thread.join()
        self._events.close()
        self._replay.close()
        self._context.term()

    def _serve(self) -> None:
        while not self._is_ending:
            if not self._replay.poll(20):
                continue
            client, _, first = self._replay.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number, payload in sorted(self.kept.items()):
                if number >= self.asked[-1]:
                    self._replay.send_multipart((client, b"", *self._topic, number.to_bytes(8, "big"), payload))
            self._replay.send_multipart((client, b"", *self._topic, END, b""))
