"""An engine's KV events over ZeroMQ: each batch once and in order, or word that some are lost for good.

The publisher numbers its batches from 0 (three parts: topic, number as 8 bytes big-endian, batch) and replays those that it still has: a
request is the first number, the answer each batch in the same three parts, and a number of -1 at the end. It is asked for all of them when
a connection begins, and for those missing when numbers jump. Where it has them no more, or replays nothing, everything known of the engine
is void; so it is when numbers begin anew, for then the engine has.

Source: vLLM 0.32, distributed/kv_events.py.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

import zmq

from kvstore.engines.sidecar.events import Event, read_batch
from kvstore.protocol.errors import KVStoreError, ProtocolError

END: Final = (1 << 64) - 1
"""The number that ends a replay, -1."""
MAX_WAITING_BATCHES: Final = 100_000
"""Received by the library and not taken: beyond, batches are lost and have to be replayed."""


class Subscriber:
    """One engine's events. Of one thread; close it."""

    def __init__(self, endpoint: str, replay_endpoint: str, *, replay_timeout_s: float) -> None:
        """Addresses as ZeroMQ has them (`tcp://HOST:PORT`); an empty `replay_endpoint`: it replays nothing. Connects in the background,
        again and again."""
        self._context = zmq.Context()
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self._expected: int | None = None
        """The number of the next batch; None: nothing has come yet."""
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(MAX_WAITING_BATCHES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)

    def take(self, timeout_s: float, apply: Callable[[list[Event]], None], lost: Callable[[], None]) -> None:
        """Wait for up to `timeout_s` for batches and hand on all that are there: `apply` a batch, `lost` where what was known is void.

        Raises ProtocolError for what is no batch, and what `apply` does; if it was numbered as one, what was known is void, too (`lost`
        has been called).
        """
        if not self._socket.poll(round(timeout_s * 1000)):
            return
        while self._socket.poll(0):
            number, payload = _numbered(self._socket.recv_multipart())
            try:
                self._accept(number, payload, apply, lost)
            except KVStoreError:
                lost()
                self._expected = number + 1
                raise

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _accept(self, number: int, payload: bytes, apply: Callable[[list[Event]], None], lost: Callable[[], None]) -> None:
        if self._expected is None or number != self._expected:
            first = self._expected or 0
            if self._expected is None or number < first:
                lost()
                first = 0
            for earlier, missed in self._replayed(first, number):
                if earlier != first:
                    break
                apply(read_batch(missed))
                first += 1
            if first < number:
                lost()
        apply(read_batch(payload))
        self._expected = number + 1

    def _replayed(self, first: int, before: int) -> Iterator[tuple[int, bytes]]:
        """The batches [first, before) that the publisher still has, in order."""
        if not self._replay_endpoint or first >= before:
            return
        until_s = time.monotonic() + self._replay_timeout_s
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay_endpoint)
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            while socket.poll(max(0, round((until_s - time.monotonic()) * 1000))):
                number, payload = _numbered(socket.recv_multipart()[1:])
                if number == END or number >= before:
                    return
                yield number, payload


def _numbered(parts: list[bytes]) -> tuple[int, bytes]:
    if len(parts) != 3 or len(parts[1]) != 8:
        raise ProtocolError(f"{len(parts)} parts where a topic, a number of 8 bytes and a batch belong")
    return int.from_bytes(parts[1], "big"), parts[2]
