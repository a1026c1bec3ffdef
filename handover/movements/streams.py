"""A Connection for one request and pair of ranks: parts go through it in the order in which they were told of, by one thread.

The sender opens it to the receiver's listener and says the ticket of its Ask first. To cancel is to close it.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvstore.protocol.errors import Cancelled, Closed, Full, KVStoreError, ProtocolError, typed
from kvstore.protocol.handover_messages import TICKET_BYTES
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.server.server import MAX_STRANGERS
from kvstore.transfer.agent import Rail
from kvstore.transfer.streams.connection import Connection, Listener, Transport

log = logging.getLogger("kvstore.handover")

ACCEPT_POLL_S: Final = 1.0
ACCEPT_PAUSE_S: Final = 0.05
"""After a failure to accept: no descriptors are left, perhaps."""
TICKET_TIMEOUT_S: Final = 2.0
"""How long a connection may take to say whose it is."""

Move = Callable[[Connection], None]
"""Sends or receives one part. Raises what the connection fails with."""
OnEnd = Callable[[KVStoreError | None], None]


@dataclass(frozen=True, slots=True)
class StreamTransport:
    """A transport that sends and receives, and this rank's rail for it."""

    connection: Transport
    rail: Rail = Rail()


class Stream:
    """See the module. Thread-safe. `on_end` of each move is called once, in any thread, when it moves no byte any more."""

    def __init__(self) -> None:
        self._moves: queue.SimpleQueue[tuple[Move, OnEnd] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._error: KVStoreError | None = None
        """Why nothing goes through it any more."""
        self._is_served = False

    def put(self, move: Move, on_end: OnEnd) -> None:
        """Have a part moved after those before."""
        with self._lock:
            error = self._error
            if error is None:
                self._moves.put((move, on_end))
        if error is not None:
            on_end(error)

    def connect(self, transport: StreamTransport, metadata: bytes, ticket: bytes, *, deadline_s: float) -> None:
        """Open it from the sender's side, in a thread that then serves it. Failure ends the moves that wait."""

        def run() -> None:
            connection = None
            try:
                deadline = Deadline(deadline_s)
                connection = transport.connection.connect(metadata, transport.rail, deadline)
                connection.send([ticket], deadline)
            except BaseException as error:
                if connection is not None:
                    connection.close()
                self._fail(_typed(error))
            else:
                self.serve(connection)

        if not _start(run):
            self._fail(Full("no thread could be had for a stream"))

    def serve(self, connection: Connection) -> None:
        """Carry out moves over `connection`, which it owns from now on, until the stream is closed or one fails, whatever that raises."""
        with self._lock:
            is_closed = self._error is not None or self._is_served
            self._is_served = True
            if not is_closed:
                self._connection = connection
        if is_closed:
            connection.close()
            return
        while (next_one := self._moves.get()) is not None:
            move, on_end = next_one
            try:
                move(connection)
            except BaseException as error:
                on_end(self._fail(_typed(error)))
                return
            on_end(None)

    def _fail(self, error: KVStoreError) -> KVStoreError:
        """Nothing goes through it any more; the reason, which is that of the first failure."""
        with self._lock:
            self._error = error = self._error or error
            connection = self._connection
        if connection is not None:
            connection.close()
        self._drain(error)
        return error

    def close(self) -> None:
        """End the move under way and those that wait, with Cancelled. A second close is a no-op."""
        self._fail(cancelled())

    def _drain(self, error: KVStoreError) -> None:
        while True:
            try:
                next_one = self._moves.get_nowait()
            except queue.Empty:
                break
            if next_one is not None:
                next_one[1](error)
        self._moves.put(None)  # wakes the thread, which may wait for more


class StreamListener:
    """Accepts the streams of all requests of a rank, and gives each to who expects its ticket. Thread-safe."""

    def __init__(self, listener: Listener, max_strangers: int = MAX_STRANGERS) -> None:
        """Owns the listener. Of more than `max_strangers` connections that have not shown a ticket the oldest is closed."""
        self._listener = listener
        self._max_strangers = max_strangers
        self._lock = threading.Lock()
        self._expected: dict[bytes, Stream] = {}
        self.arriving: dict[Connection, None] = {}
        """Those that have not shown their ticket, the oldest first; each has a thread for the while."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="kvstore-streams", daemon=True)
        self._thread.start()

    def metadata(self) -> bytes:
        return self._listener.metadata()

    def expect(self, ticket: bytes) -> Stream:
        """The stream whose connection will show this ticket."""
        stream = Stream()
        with self._lock:
            self._expected[ticket] = stream
        return stream

    def forget(self, ticket: bytes) -> None:
        """Nobody is to come with this ticket any more."""
        with self._lock:
            self._expected.pop(ticket, None)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self._listener.accept(ACCEPT_POLL_S)
            except Closed:
                return
            except BaseException as error:
                _typed(error)
                self._closing.wait(ACCEPT_PAUSE_S)
                continue
            if connection is not None:
                self._welcome(connection)

    def _welcome(self, connection: Connection) -> None:
        with self._lock:
            oldest = next(iter(self.arriving)) if len(self.arriving) >= self._max_strangers else None
            if oldest is not None:
                del self.arriving[oldest]
            self.arriving[connection] = None
        if oldest is not None:
            log.warning("%d streams have not shown a ticket: the oldest is closed", self._max_strangers)
            oldest.close()
        if not _start(partial(self._introduce, connection)):
            with self._lock:
                self.arriving.pop(connection, None)
            connection.close()

    def _introduce(self, connection: Connection) -> None:
        ticket = bytearray(TICKET_BYTES)
        with self._lock:
            is_closed = self._closing.is_set()
        try:
            if is_closed:
                raise Closed("the listener is closed")
            connection.recv_into([memoryview(ticket)], Deadline(TICKET_TIMEOUT_S))
            with self._lock:
                stream = self._expected.pop(bytes(ticket), None)
            if stream is None:
                raise ProtocolError("nobody expects this ticket")
        except BaseException as error:
            _typed(error)
            connection.close()
            return
        finally:
            with self._lock:
                self.arriving.pop(connection, None)
        stream.serve(connection)

    def close(self) -> None:
        """Stop accepting; streams are their requests' to close."""
        with self._lock:
            self._closing.set()
            arriving = list(self.arriving)
        self._listener.close()
        for connection in arriving:
            connection.close()
        self._thread.join()


def cancelled() -> Cancelled:
    return Cancelled("the hand-over was cancelled")


def _typed(error: BaseException) -> KVStoreError:
    """As the stream's moves are told of it. A plug-in's or a part's mistake is logged: no thread dies of it."""
    if not isinstance(error, KVStoreError):
        log.error("a stream of a hand-over failed", exc_info=error)
    return typed(error)


def _start(run: Callable[[], None]) -> bool:
    """In a thread of its own; False: the system has none."""
    try:
        threading.Thread(target=run, name="kvstore-stream", daemon=True).start()
    except RuntimeError:
        return False
    return True
