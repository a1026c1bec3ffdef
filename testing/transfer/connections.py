"""Conformance of connections, as a test class to inherit. Needs the `dev` extra (pytest).

    class TestMyConnection(ConnectionConformance):
        connection_class = MyConnection
        rail = Rail(address="127.0.0.1")

It uses nothing but the interface of streams/connection.py.
"""

import select
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import pytest

from kvstore.protocol.errors import Closed, DeadlineExceeded, ProtocolError, Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import (
    PATIENCE_S,
    QUIET_S,
    SHORT_S,
    SOON_S,
    assert_nothing_is_left,
    in_background,
    is_quiet,
    within,
)
from kvstore.testing.transfer.peer import pattern
from kvstore.transfer.agent import Rail
from kvstore.transfer.streams.connection import Connection, Listener

MIB: Final = 1 << 20
MAX_METADATA_BYTES: Final = 64 << 10
GARBAGE: Final = [b"", b"\0", b"\xff" * 100, b"garbage", bytes(range(256)) * 256]


class ConnectionConformance:
    """Conformance of any connection. The fixtures `near` and `far` are the connecting and the accepted end of one."""

    connection_class: type[Connection]
    rail: Rail = Rail()

    @pytest.fixture
    def listener(self) -> Iterator[Listener]:
        listener = self.connection_class.listen(self.rail)
        yield listener
        listener.close()

    @pytest.fixture
    def ends(self, listener: Listener) -> Iterator[tuple[Connection, Connection]]:
        ends = self.open(listener)
        yield ends
        for end in ends:
            end.close()

    @pytest.fixture
    def near(self, ends: tuple[Connection, Connection]) -> Connection:
        return ends[0]

    @pytest.fixture
    def far(self, ends: tuple[Connection, Connection]) -> Connection:
        return ends[1]

    def open(self, listener: Listener) -> tuple[Connection, Connection]:
        """Return (the connecting end, the accepted end)."""
        accepting = in_background(lambda: listener.accept(PATIENCE_S))
        near = self.connection_class.connect(listener.metadata(), self.rail, Deadline(PATIENCE_S))
        far = accepting.result(PATIENCE_S)
        assert far is not None
        return near, far

    def test_parts_of_all_sizes_arrive_whole_and_in_order(self, near: Connection, far: Connection) -> None:
        sizes = [0, 1, 7, 8, 4095, 4096, 4097, 65_536, 0, MIB, 8 * MIB - 1, 8 * MIB, 0]
        parts = [pattern(number, size_bytes) for number, size_bytes in enumerate(sizes)]
        assert carry(near, far, parts) == parts
        assert carry(far, near, parts[::-1]) == parts[::-1]

    def test_no_parts_and_empty_parts_are_sent_without_effect(self, near: Connection, far: Connection) -> None:
        batches: list[list[memoryview | bytes]] = [[], [b""], [b"", memoryview(b"")]]
        for parts in batches:
            near.send(parts, Deadline(PATIENCE_S))
            far.recv_into([memoryview(bytearray(0)) for _ in parts], Deadline(PATIENCE_S))
        assert carry(near, far, [b"after"]) == [b"after"]

    def test_views_of_any_memory_are_sent(self, near: Connection, far: Connection) -> None:
        data = pattern(1, 10_000)
        views: list[memoryview | bytes] = [memoryview(data)[1:5000], memoryview(bytearray(data))[5000:], data]
        assert carry(near, far, views) == [data[1:5000], data[5000:], data]

    def test_both_directions_at_once(self, near: Connection, far: Connection) -> None:
        there, back = [pattern(1, MIB)] * 40, [pattern(2, MIB)] * 40
        other = in_background(lambda: carry(far, near, back))
        assert carry(near, far, there) == there
        assert other.result(PATIENCE_S) == back

    def test_what_was_sent_may_be_changed_afterwards(self, near: Connection, far: Connection) -> None:
        data = bytearray(pattern(1, 4 * MIB))

        def send_and_change() -> None:
            near.send([memoryview(data)], Deadline(PATIENCE_S))
            data[:] = bytes(len(data))

        sending = in_background(send_and_change)
        is_quiet(sending)
        assert receive(far, [4 * MIB]) == [pattern(1, 4 * MIB)]
        sending.result(PATIENCE_S)

    def test_connections_of_one_listener_do_not_mix(self, listener: Listener) -> None:
        pairs = [self.open(listener) for _ in range(3)]
        for number, (near, _) in enumerate(pairs):
            near.send([bytes([number])], Deadline(PATIENCE_S))
        assert [receive(far, [1]) for _, far in pairs] == [[b"\0"], [b"\1"], [b"\2"]]
        for end in sum(pairs, ()):
            end.close()

    def test_a_silent_peer_is_given_up_at_the_deadline(self, near: Connection) -> None:
        with within(SHORT_S), pytest.raises(DeadlineExceeded):
            near.recv_into([memoryview(bytearray(1))], Deadline(SHORT_S))
        assert not near.is_open

    def test_send_to_a_blocked_peer_ends_at_the_deadline(self, near: Connection, far: Connection) -> None:
        data, deadline = pattern(1, 8 * MIB), Deadline(SHORT_S)
        with within(SHORT_S), pytest.raises(DeadlineExceeded):
            while True:
                near.send([data], deadline)
        assert not near.is_open

    def test_a_peer_that_stalls_is_given_up_before_the_deadline(self, near: Connection, far: Connection) -> None:
        near.stall_timeout_s = SHORT_S
        far.send([b"a"], Deadline(PATIENCE_S))
        with within(SHORT_S), pytest.raises(Unreachable):
            near.recv_into([memoryview(bytearray(1)), memoryview(bytearray(1))], Deadline(PATIENCE_S))
        assert not near.is_open

    def test_nothing_is_written_to_the_parts_after_an_error(self, near: Connection, far: Connection) -> None:
        late = bytearray(MIB)
        far.send([b"first"], Deadline(PATIENCE_S))
        with pytest.raises(DeadlineExceeded):
            near.recv_into([memoryview(bytearray(5)), memoryview(late)], Deadline(SHORT_S))
        with within(PATIENCE_S), pytest.raises((Unreachable, DeadlineExceeded)):
            while True:
                far.send([b"\xee" * MIB], Deadline(SHORT_S))
        assert not any(late)

    def test_a_peer_that_closes_is_unreachable(self, near: Connection, far: Connection) -> None:
        receiving = in_background(lambda: receive(near, [1]))
        is_quiet(receiving)
        far.close()
        with pytest.raises(Unreachable):
            receiving.result(SOON_S)
        assert not near.is_open

    def test_sending_to_a_closed_peer_fails(self, near: Connection, far: Connection) -> None:
        far.close()
        with within(SOON_S), pytest.raises(Unreachable):
            while True:
                near.send([b"x" * 4096], Deadline(SOON_S))
        assert not near.is_open

    def test_closing_ends_a_receive_in_another_thread(self, near: Connection) -> None:
        receiving = in_background(lambda: receive(near, [1]))
        assert is_quiet(receiving)
        near.close()
        with pytest.raises(Closed):
            receiving.result(SOON_S)

    def test_close_ends_a_send_in_another_thread(self, near: Connection, far: Connection) -> None:
        sending = in_background(lambda: near.send([pattern(1, 8 * MIB)] * 32, Deadline(PATIENCE_S)))
        assert is_quiet(sending)
        with within(SOON_S):
            near.close()
        with pytest.raises(Closed):
            sending.result(SOON_S)
        with pytest.raises(Unreachable):
            for _ in range(32):
                receive(far, [8 * MIB])

    def test_closing_twice_is_closing_once(self, near: Connection) -> None:
        near.close()
        near.close()
        assert not near.is_open

    def test_a_closed_connection_raises_closed(self, near: Connection) -> None:
        near.close()
        with pytest.raises(Closed):
            near.send([b"x"], Deadline(PATIENCE_S))
        with pytest.raises(Closed):
            near.recv_into([memoryview(bytearray(1))], Deadline(PATIENCE_S))

    def test_its_descriptor_signals_data_and_close(self, near: Connection, far: Connection) -> None:
        assert carry(far, near, [b"settled"]) == [b"settled"]
        if near.fileno() == -1:
            pytest.skip("this transport has no descriptor to wait on")
        assert not is_readable(near, timeout_s=QUIET_S)
        far.send([b"x"], Deadline(PATIENCE_S))
        assert is_readable(near, timeout_s=PATIENCE_S)
        assert receive(near, [1]) == [b"x"]
        far.close()
        assert is_readable(near, timeout_s=PATIENCE_S)

    @pytest.mark.parametrize("metadata", GARBAGE, ids=range(len(GARBAGE)))
    def test_garbage_for_metadata_is_refused(self, metadata: bytes) -> None:
        with within(SOON_S), pytest.raises(ProtocolError):
            self.connection_class.connect(metadata, self.rail, Deadline(PATIENCE_S))

    def test_a_listener_that_is_gone_is_unreachable(self, listener: Listener) -> None:
        listener.close()
        with within(SOON_S), pytest.raises(Unreachable):
            self.connection_class.connect(listener.metadata(), self.rail, Deadline(SOON_S))

    def test_a_listener_that_never_accepts_does_not_hold_up_its_peer(self, listener: Listener) -> None:
        with within(SHORT_S):
            with suppress(DeadlineExceeded, Unreachable):
                self.connection_class.connect(listener.metadata(), self.rail, Deadline(SHORT_S)).close()

    def test_a_closed_listener_keeps_its_connections(self, listener: Listener, near: Connection, far: Connection) -> None:
        accepting = in_background(lambda: listener.accept(PATIENCE_S))
        is_quiet(accepting)
        listener.close()
        listener.close()
        with pytest.raises(Closed):
            accepting.result(SOON_S)
        with pytest.raises(Closed):
            listener.accept(PATIENCE_S)
        assert carry(near, far, [b"stays"]) == [b"stays"]

    def test_closed_connections_leak_no_descriptors_or_threads(self, listener: Listener) -> None:
        def open_and_close() -> None:
            near, far = self.open(listener)
            assert carry(near, far, [b"x"]) == [b"x"]
            near.close()
            far.close()

        open_and_close()  # what a library makes once, at its first use, is not a leak
        assert_nothing_is_left(open_and_close)


def carry(sender: Connection, receiver: Connection, parts: Sequence[memoryview | bytes]) -> list[bytes]:
    """Send from one end and return what the other end received."""
    sending = in_background(lambda: sender.send(parts, Deadline(PATIENCE_S)))
    received = receive(receiver, list(map(len, parts)))
    sending.result(PATIENCE_S)
    return received


def receive(connection: Connection, sizes: Sequence[int]) -> list[bytes]:
    buffers = [bytearray(size_bytes) for size_bytes in sizes]
    connection.recv_into([memoryview(buffer) for buffer in buffers], Deadline(PATIENCE_S))
    return list(map(bytes, buffers))


def is_readable(connection: Connection, *, timeout_s: float) -> bool:
    poller = select.poll()  # select.select takes no descriptor beyond 1,023
    poller.register(connection.fileno(), select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
