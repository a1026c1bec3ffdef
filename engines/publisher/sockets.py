"""Publication of the store's events over ZeroMQ: numbered batches, their replay, and the loop that produces them.

- **Batches** have three parts: topic, number as 8 bytes big-endian, batch.
- **Replay** has its own socket. A request has the first number; the response has each batch that is still kept, in the
  same three parts behind an empty one, and number -1 at the end.
- **Loop.** Each round polls the nodes for events, publishes them as a batch and serves replays, in the thread of `run`.

Source: vLLM 0.32, distributed/kv_events.py.
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
"""Limit of the send queue of one subscriber. A slower one loses batches and has to request a replay."""


class PublishingSockets:
    """Sockets of publication and replay. Not thread-safe; close it."""

    def __init__(self, endpoint: str, replay_endpoint: str, *, topic: str, kept_batches: int) -> None:
        """Bind both ZeroMQ addresses; an empty `replay_endpoint`: no replay. Raises ConfigError: an address cannot
        be bound."""
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.set_hwm(MAX_UNSENT_BATCHES)
        self._replay = self._context.socket(zmq.ROUTER) if replay_endpoint else None
        if self._replay is not None:
            # A ROUTER silently drops messages beyond the limit. It has to fit a whole replay twice, because ZeroMQ
            # updates its count of read messages only every half of the limit.
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
        """Send a batch to all current subscribers. Does not block."""
        self._events.send_multipart((self._topic, self._number.to_bytes(NUMBER_BYTES, "big"), batch))
        self._kept.append((self._number, batch))
        self._number += 1

    def serve(self, timeout_s: float) -> None:
        """Serve replays until no request arrives for `timeout_s`, or at once after the first. Malformed requests are
        ignored."""
        if self._replay is None:
            self._events.poll(round(timeout_s * 1000), zmq.POLLIN)  # a PUB socket receives nothing: sleep
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
        assert self._replay is not None, "a request arrived on it"
        self._replay.send_multipart((client, b"", *parts))


def _bound(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot publish at {endpoint!r}: {error}; give tcp://HOST:PORT of this machine, or tcp://*:PORT") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


class EventPublisher:
    """Loop that publishes the store's events. Any thread and signal handlers may call `stop` and read the counters."""

    def __init__(self, recorder: Recorder, sockets: PublishingSockets, form: EventForm, *, interval_s: float) -> None:
        self.recorder = recorder
        self._sockets = sockets
        self._form = form
        self._interval_s = interval_s
        self._is_ending = False
        self.batches = 0
        """Batches published so far."""
        self.round_s = time.monotonic()
        """End of the last round, by time.monotonic."""

    def run(self) -> None:
        """Run rounds until `stop`. Returns within a round and `interval_s` after it."""
        while not self._is_ending:
            self.round()

    def round(self) -> None:
        """Publish the events since the last round and serve replays."""
        if (found := self._form.batch(self.recorder.poll())) is not None:
            self._sockets.publish(found)
            self.batches += 1
        self._sockets.serve(self._interval_s)
        self.round_s = time.monotonic()

    def stop(self) -> None:
        self._is_ending = True
