"""Subscriber to an engine's KV events over ZeroMQ: every batch once and in order, or a callback that some were lost.

**Protocol.** The publisher numbers its batches from 0 and sends each as topic, number (8 bytes, big-endian) and batch.
It replays batches that it still keeps: the request has the first number, the response has each batch from there on, and
number -1 at the end. vLLM 0.32 and SGLang 0.5.23 replay with a topic frame, releases of 2025 without one; both are
accepted.

**Recovery.** Every replay begins with the last batch that was applied. If the publisher returns another batch under its
number, or none, it was restarted or has dropped that batch: all known blocks are void, and everything that the
publisher keeps is replayed.

Source: vLLM 0.32, distributed/kv_events.py; SGLang 0.5.23, srt/disaggregation/kv_events.py.
"""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import Final, NamedTuple, TypeAlias

import zmq

from kvstore.engines.kv_events.events import Event, read_batch
from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument, KVStoreError, ProtocolError

END: Final = (1 << 64) - 1
"""Number that ends a replay, -1."""
MAX_WAITING_BATCHES: Final = 100_000
"""Limit of ZeroMQ's receive queue. Batches beyond it are lost and have to be replayed."""
Apply: TypeAlias = Callable[[list[Event]], None]
Lost: TypeAlias = Callable[[], None]


class _EventBatch(NamedTuple):
    number: int
    payload: bytes


class Subscriber:
    """Subscription to one engine's events. Not thread-safe; close it."""

    def __init__(self, endpoint: str, replay_endpoint: str, *, replay_timeout_s: float) -> None:
        """Connect in the background, and reconnect after a lost connection.

        Args:
            endpoint: ZeroMQ address, `tcp://HOST:PORT`.
            replay_endpoint: likewise; empty: the publisher has no replay.
            replay_timeout_s: for a whole replay.

        Raises:
            InvalidArgument: an endpoint is malformed.
        """
        self._context = zmq.Context()
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self._last: _EventBatch | None = None
        """Last batch that was applied; None: none since the start or since all blocks became void."""
        self._replayed: dict[int, int] = {}
        """Hash of each replayed batch, by number: it may arrive again from the publication."""
        self._failure: KVStoreError | None = None
        """Last error of a replayed batch."""
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(MAX_WAITING_BATCHES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            _connect(self._socket, endpoint)
        except InvalidArgument:
            self.close()
            raise

    def take(self, timeout_s: float, apply: Apply, lost: Lost) -> None:
        """Wait up to `timeout_s` for batches, then apply all that have arrived. Calls `lost` when known blocks become
        void.

        Raises ProtocolError for a malformed message or batch, and what `apply` raises. If the message had a number,
        `lost` was called and the subscription continues with the next batch.
        """
        if not self._socket.poll(round(timeout_s * 1000)):
            return
        while self._socket.poll(0):
            number, payload = _numbered(self._socket.recv_multipart())
            if self._replayed.pop(number, None) == hash(payload):
                continue
            self._replayed.clear()
            failure = None
            if self._last is None or number != self._last.number + 1:
                failure = self._fill_gap(number, apply, lost)
            self._apply(number, payload, apply, lost)
            if failure is not None:
                raise failure

    def catch_up(self, apply: Apply, lost: Lost) -> None:
        """Apply everything published since the last batch; call `lost` if the publisher dropped that one or was
        restarted.

        Without a replay endpoint neither can be detected, so `lost` is always called. Raises as `take`.
        """
        failure = self._fill_gap(END, apply, lost)
        if failure is not None:
            raise failure

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _fill_gap(self, before: int, apply: Apply, lost: Lost) -> KVStoreError | None:
        """Apply the batches between the last one and number `before`, or call `lost`. Return the error, if any.

        After an incomplete replay all blocks are void, and the next replay has all batches.
        """
        self._failure = None
        try:
            if self._last is None or not self._resume(before, apply, lost):
                self._start_over(before, apply, lost)
        except KVStoreError as error:
            lost()
            self._last = None
            return error
        if before != END and self._last is not None and self._last.number + 1 != before:
            lost()
        return self._failure

    def _resume(self, before: int, apply: Apply, lost: Lost) -> bool:
        """Apply the batches after the last one; return False if the publisher does not have that one."""
        assert self._last is not None, "a batch was applied"
        if self._last.number >= before:
            return False
        with closing(self._replay(self._last.number, before)) as replay:
            if next(replay, None) != self._last:
                return False
            self._apply_all(replay, apply, lost)
        return True

    def _start_over(self, before: int, apply: Apply, lost: Lost) -> None:
        """Call `lost`, then apply all batches that the publisher keeps."""
        lost()
        self._last = None
        with closing(self._replay(0, before)) as replay:
            self._apply_all(replay, apply, lost)

    def _apply_all(self, replay: Iterable[_EventBatch], apply: Apply, lost: Lost) -> None:
        """Apply a replay. Known blocks are void after a gap in it, or after a batch that cannot be applied."""
        for number, payload in replay:
            if self._last is not None and number != self._last.number + 1:
                lost()
            self._replayed[number] = hash(payload)
            try:
                self._apply(number, payload, apply, lost)
            except KVStoreError as error:
                self._failure = error

    def _apply(self, number: int, payload: bytes, apply: Apply, lost: Lost) -> None:
        self._last = _EventBatch(number, payload)
        try:
            apply(read_batch(payload))
        except KVStoreError:
            lost()
            raise

    def _replay(self, first: int, before: int) -> Generator[_EventBatch]:
        """Yield the batches [first, before) that the publisher keeps, in order. Raises DeadlineExceeded: no end mark
        in time."""
        if not self._replay_endpoint or first >= before:
            return
        until_s = time.monotonic() + self._replay_timeout_s
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(MAX_WAITING_BATCHES)
            _connect(socket, self._replay_endpoint)
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            while socket.poll(max(0, round((until_s - time.monotonic()) * 1000))):
                batch = _numbered(socket.recv_multipart()[1:])
                if batch.number >= before:
                    return
                yield batch
        raise DeadlineExceeded(
            f"{self._replay_endpoint} did not end its replay of events within {self._replay_timeout_s:g} s: check events_replay"
        )


def _connect(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise InvalidArgument(f"{endpoint!r} is no ZeroMQ address ({error}): give tcp://HOST:PORT") from None


def _numbered(parts: list[bytes]) -> _EventBatch:
    """Parse [topic, number, batch] or [number, batch]. Raises ProtocolError."""
    if len(parts) not in (2, 3) or len(parts[-2]) != 8:
        raise ProtocolError(f"a message has {len(parts)} parts: expected [topic,] number of 8 bytes, batch")
    return _EventBatch(int.from_bytes(parts[-2], "big"), parts[-1])
