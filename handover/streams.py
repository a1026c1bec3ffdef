"""A Connection for one request and pair of ranks: parts go through it in the order in which they were told of, by one thread.

The sender opens it to the receiver's listener and says the ticket of its Ask first. To cancel is to close it.
"""

import queue
import threading
from collections.abc import Callable
from typing import Final

from kvstore.protocol.errors import Cancelled, Closed, KVStoreError, ProtocolError
from kvstore.protocol.handover_messages import TICKET_BYTES
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Rail
from kvstore.transfer.streams.connection import Connection, Listener

ACCEPT_POLL_S: Final = 1.0
TICKET_TIMEOUT_S: Final = 2.0
"""How long a connection may take to say whose it is."""

Move = Callable[[Connection], None]
"""Sends or receives one part. Raises what the connection fails with."""
OnEnd = Callable[[KVStoreError | None], None]


class Stream:
    """See the module. Thread-safe. `on_end` of each move is called once, in any thread, when it moves no byte any more."""

    def __init__(self) -> None:
        self._moves: queue.SimpleQueue[tuple[Move, OnEnd] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._is_closed = False
        self._is_served = False

    def put(self, move: Move, on_end: OnEnd) -> None:
        """Have a part moved after those before."""
        with self._lock:
            if not self._is_closed:
                self._moves.put((move, on_end))
                return
        on_end(_cancelled())

    def connect(self, kind: type[Connection], metadata: bytes, rail: Rail, ticket: bytes, *, deadline_s: float) -> None:
        """Open it from the sender's side, in a thread that then serves it. Failure ends the moves that wait."""

        def run() -> None:
            try:
                deadline = Deadline(deadline_s)
                connection = kind.connect(metadata, rail, deadline)
                connection.send([ticket], deadline)
            except KVStoreError as error:
                self._fail(error)
            else:
                self.serve(connection)

        threading.Thread(target=run, name="kvstore-stream", daemon=True).start()

    def serve(self, connection: Connection) -> None:
        """Carry out moves over `connection`, which it owns from now on, until the stream is closed or one fails."""
        with self._lock:
            is_closed = self._is_closed or self._is_served
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
            except KVStoreError as error:
                on_end(_cancelled() if self._is_closed else error)
                self._fail(error)
                return
            on_end(None)

    def _fail(self, error: KVStoreError) -> None:
        """Nothing goes through it any more."""
        self._shut()
        self._drain(error)

    def close(self) -> None:
        """End the move under way and those that wait, with Cancelled. A second close is a no-op."""
        self._shut()
        self._drain(_cancelled())

    def _shut(self) -> None:
        with self._lock:
            self._is_closed = True
            connection = self._connection
        if connection is not None:
            connection.close()

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

    def __init__(self, listener: Listener) -> None:
        """Owns the listener."""
        self._listener = listener
        self._lock = threading.Lock()
        self._expected: dict[bytes, Stream] = {}
        self.arriving: set[Connection] = set()
        """Those that have not shown their ticket."""
        self._is_closed = False
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
        while not self._is_closed:
            try:
                connection = self._listener.accept(ACCEPT_POLL_S)
            except Closed:
                return
            except KVStoreError:
                continue
            if connection is not None:
                threading.Thread(target=self._introduce, args=(connection,), name="kvstore-stream", daemon=True).start()

    def _introduce(self, connection: Connection) -> None:
        ticket = bytearray(TICKET_BYTES)
        with self._lock:
            self.arriving.add(connection)
            is_closed = self._is_closed
        try:
            if is_closed:
                raise Closed("the listener is closed")
            connection.recv_into([memoryview(ticket)], Deadline(TICKET_TIMEOUT_S))
            with self._lock:
                stream = self._expected.pop(bytes(ticket), None)
            if stream is None:
                raise ProtocolError("nobody expects this ticket")
        except KVStoreError:
            connection.close()
            return
        finally:
            with self._lock:
                self.arriving.discard(connection)
        stream.serve(connection)

    def close(self) -> None:
        """Stop accepting; streams are their requests' to close."""
        with self._lock:
            self._is_closed = True
            arriving = list(self.arriving)
        self._listener.close()
        for connection in arriving:
            connection.close()
        self._thread.join()


def _cancelled() -> Cancelled:
    return Cancelled("the hand-over was cancelled")
