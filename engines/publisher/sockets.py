"""Publication of the store's events: numbered batches over ZeroMQ, and the rounds that fill them.

Numbered batches over ZeroMQ, and again for who has missed some: three parts (topic, number as 8 bytes big-endian, batch).

A replay is asked for on a socket of its own, by the first number, and answered by each batch that is still kept, in the same three parts
behind an empty one, and a number of -1 at the end.

Source: vLLM 0.32, distributed/kv_events.py.

Rounds of a publisher: ask the nodes what happened, publish it as a batch, answer who has missed some. One thread, that of `run`.
"""

import time
from collections import deque
from typing import Final

import zmq

from kvstore.client.recorder import Recorder
from kvstore.engines.publisher.form import EventForm
from kvstore.protocol.errors import ConfigError

NUMBER_BYTES: Final = 8
END: Final = b"\xff" * NUMBER_BYTES
MAX_UNSENT_BATCHES: Final = 100_000
"""To one subscriber: one that takes nothing loses batches beyond, and has to ask for them."""


class PublishingSockets:
    """Of one thread; close it."""

    def __init__(self, endpoint: str, replay_endpoint: str, *, topic: str, kept_batches: int) -> None:
        """Binds both addresses, as ZeroMQ has them; an empty `replay_endpoint`: nothing is replayed. Raises ConfigError: it cannot."""
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.set_hwm(MAX_UNSENT_BATCHES)
        self._replay = self._context.socket(zmq.ROUTER) if replay_endpoint else None
        if self._replay is not None:
            # A router drops what is beyond without a word. To one reader: a whole answer, and as much again, for ZeroMQ takes note of what
            # was read in halves of this only.
            self._replay.setsockopt(zmq.SNDHWM, 2 * (kept_batches + 1))
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept_batches)
        self._number = 0
        try:
            self.endpoint = _bound(self._events, endpoint)
            self.replay_endpoint = _bound(self._replay, replay_endpoint) if self._replay is not None else ""
        except ConfigError:
            self.close()
            raise

    def publish(self, batch: bytes) -> None:
        """To all who listen now. Never waits."""
        self._events.send_multipart((self._topic, self._number.to_bytes(NUMBER_BYTES, "big"), batch))
        self._kept.append((self._number, batch))
        self._number += 1

    def serve(self, timeout_s: float) -> None:
        """Answer those who have missed batches, for up to `timeout_s` from the last question on. What is no question is passed over."""
        if self._replay is None:
            self._events.poll(round(timeout_s * 1000), zmq.POLLIN)  # nothing ever comes: it waits
            return
        while self._replay.poll(round(timeout_s * 1000)):
            parts = self._replay.recv_multipart()
            if len(parts) == 3 and len(parts[2]) == NUMBER_BYTES:
                self._answer(parts[0], int.from_bytes(parts[2], "big"))
            timeout_s = 0.0

    def close(self) -> None:
        for socket in (self._events, self._replay):
            if socket is not None:
                socket.close(linger=0)
        self._context.term()

    def _answer(self, client: bytes, first: int) -> None:
        for number, batch in self._kept:
            if number >= first:
                self._replay_to(client, self._topic, number.to_bytes(NUMBER_BYTES, "big"), batch)
        self._replay_to(client, b"", END, b"")

    def _replay_to(self, client: bytes, *parts: bytes) -> None:
        assert self._replay is not None, "somebody has asked it"
        self._replay.send_multipart((client, b"", *parts))


def _bound(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot publish at {endpoint!r}: {error}; give tcp://HOST:PORT of this machine, or tcp://*:PORT") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


class EventPublisher:
    """See the module. `stop`, and what is told of it, are for any thread and for signal handlers."""

    def __init__(self, recorder: Recorder, sockets: PublishingSockets, form: EventForm, *, interval_s: float) -> None:
        self.recorder = recorder
        self._sockets = sockets
        self._form = form
        self._interval_s = interval_s
        self._is_ending = False
        self.batches = 0
        """Published so far."""
        self.round_s = time.monotonic()
        """By `time.monotonic`, when the last round ended."""

    def run(self) -> None:
        """Until `stop`; at most a round, and `interval_s`, longer."""
        while not self._is_ending:
            self.round()

    def round(self) -> None:
        """What happened since the last one is published."""
        if (found := self._form.batch(self.recorder.poll())) is not None:
            self._sockets.publish(found)
            self.batches += 1
        self._sockets.serve(self._interval_s)
        self.round_s = time.monotonic()

    def stop(self) -> None:
        self._is_ending = True
