"""TCP is a Connection, and what only it does."""

import resource
import socket
import threading
from collections.abc import Sequence

import pytest

from kvstore.protocol.errors import Closed, ConfigError, DeadlineExceeded, Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Rail
from kvstore.transfer.streams.tcp import MAGIC, MAX_VECTORS, TcpConnection, TcpListener
from kvstore.transfer.testing.connections import ConnectionConformance, is_readable
from kvstore.transfer.testing.waiting import PATIENCE_S, SHORT_S, SOON_S, in_background, within

PAUSES_S = 1.0
"""Less than all pauses of a peer that is slow, and far more than one of them, also on a busy machine."""


class TestTcp(ConnectionConformance):
    connection_class = TcpConnection
    rail = Rail(address="127.0.0.1")

    def test_a_short_deadline_of_before_is_not_taken_for_a_stall(self, near: TcpConnection, far: TcpConnection) -> None:
        """The kernel still has the earlier, shorter limit: a peer that is slower than that has not stalled yet."""
        near.stall_timeout_s = SOON_S
        far.send([b"a"], Deadline(PATIENCE_S))
        near.recv_into([memoryview(bytearray(1))], Deadline(SHORT_S / 4))
        late = bytearray(1)
        receiving = in_background(lambda: near.recv_into([memoryview(late)], Deadline(PATIENCE_S)))
        threading.Event().wait(SHORT_S)
        far.send([b"b"], Deadline(PATIENCE_S))
        receiving.result(PATIENCE_S)
        assert late == b"b"

    def test_a_deadline_that_a_limit_of_before_is_earlier_than_is_met_in_full(self, near: TcpConnection, far: TcpConnection) -> None:
        far.send([b"a"], Deadline(PATIENCE_S))
        near.recv_into([memoryview(bytearray(1))], Deadline(SHORT_S / 4))
        deadline = Deadline(SHORT_S)
        with within(SHORT_S), pytest.raises(DeadlineExceeded):
            near.recv_into([memoryview(bytearray(1))], deadline)
        with pytest.raises(DeadlineExceeded):
            deadline.left_s()

    def test_a_send_goes_on_where_the_kernel_stopped(self, near: TcpConnection, far: TcpConnection) -> None:
        """More parts than one call takes, to a peer that is so slow that calls end in the middle of a part; but never stalls."""
        near.stall_timeout_s = PAUSES_S
        part = bytes(range(251)) * 64
        count = MAX_VECTORS * 2 + 5
        sending = in_background(lambda: near.send([part] * count, Deadline(PATIENCE_S)))
        received = memoryview(bytearray(len(part) * count))
        for number in range(10):
            threading.Event().wait(PAUSES_S / 8)
            far.recv_into([received[number << 20 : number + 1 << 20]], Deadline(PATIENCE_S))
        far.recv_into([received[10 << 20 :]], Deadline(PATIENCE_S))
        sending.result(PATIENCE_S)
        assert received == part * count

    def test_a_receive_goes_on_after_a_pause(self, near: TcpConnection, far: TcpConnection) -> None:
        """Longer than a stall in all, but never without a byte for as long."""
        near.stall_timeout_s = PAUSES_S
        parts = [bytearray(2), bytearray(3), bytearray(0), bytearray(4)]
        receiving = in_background(lambda: near.recv_into([memoryview(part) for part in parts], Deadline(PATIENCE_S)))
        for byte in b"123456789":
            threading.Event().wait(PAUSES_S / 8)
            far.send([bytes([byte])], Deadline(PATIENCE_S))
        receiving.result(PATIENCE_S)
        assert parts == [b"12", b"345", b"", b"6789"]

    def test_an_interrupted_call_closes_the_connection(self, near: TcpConnection) -> None:
        def interrupted(views: Sequence[memoryview]) -> int:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            near._move(interrupted, [b"x"], Deadline(PATIENCE_S), socket.SO_SNDTIMEO)
        with pytest.raises(Closed):
            near.send([b"x"], Deadline(PATIENCE_S))

    def test_the_descriptor_stays_until_the_last_thread_has_left(self, near: TcpConnection) -> None:
        """Else the next connection could get its number, and a thread that is still inside write to it."""
        entered, go_on = threading.Event(), threading.Event()

        def slow(views: Sequence[memoryview]) -> int:
            entered.set()
            assert go_on.wait(PATIENCE_S)
            return 0

        moving = in_background(lambda: near._move(slow, [b"x"], Deadline(PATIENCE_S), socket.SO_SNDTIMEO))
        assert entered.wait(PATIENCE_S)
        number = near.fileno()
        near.close()
        assert near.fileno() == number
        go_on.set()
        with pytest.raises(Closed):
            moving.result(PATIENCE_S)
        assert near.fileno() == -1

    def test_a_peer_that_reset_is_closed_without_complaint(self, near: TcpConnection, far: TcpConnection) -> None:
        far.send([b"unread"], Deadline(PATIENCE_S))
        assert is_readable(near, timeout_s=PATIENCE_S)
        far.close()
        with pytest.raises(Unreachable):
            while True:
                near.recv_into([memoryview(bytearray(6))], Deadline(PATIENCE_S))
        near.close()


def open_pair(listener: TcpListener, rail: Rail) -> tuple[TcpConnection, TcpConnection]:
    accepting = in_background(lambda: listener.accept(PATIENCE_S))
    near = TcpConnection.connect(listener.metadata(), rail, Deadline(PATIENCE_S))
    far = accepting.result(PATIENCE_S)
    assert far is not None
    return near, far


def test_connections_leave_by_the_rails_address() -> None:
    listener = TcpListener("127.0.0.1", 0)
    near, far = open_pair(listener, Rail(address="127.0.0.7"))
    assert far._peer.startswith("127.0.0.7:")
    for end in (near, far, listener):
        end.close()


def test_an_address_of_ipv6_is_one() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        listener = TcpListener("::1", 0)
    except ConfigError:
        pytest.skip("no loopback of IPv6")
    near, far = open_pair(listener, Rail())
    near.send([b"x"], Deadline(PATIENCE_S))
    far.recv_into([memoryview(bytearray(1))], Deadline(PATIENCE_S))
    for end in (near, far, listener):
        end.close()


def test_a_rail_that_cannot_reach_the_peer_is_unreachable() -> None:
    listener = TcpListener("127.0.0.1", 0)
    with pytest.raises(Unreachable, match="over lost0"):
        TcpConnection.connect(listener.metadata(), Rail(device="lost0", address="192.0.2.1"), Deadline(PATIENCE_S))
    listener.close()


def test_a_listener_with_a_full_queue_does_not_hold_up_its_peer() -> None:
    """Connecting waits for an answer that does not come: until the deadline and no longer."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.create_connection(full.getsockname()) for _ in range(1)]
        with within(SHORT_S), pytest.raises(DeadlineExceeded):
            while True:
                connection = TcpConnection.connect(MAGIC + b"127.0.0.1:%d" % full.getsockname()[1], Rail(), Deadline(SHORT_S))
                waiting.append(connection._sock)
        for sock in waiting:
            sock.close()


def test_a_process_without_descriptors_cannot_accept_and_can_again_later() -> None:
    listener = TcpListener("127.0.0.1", 0)
    near = TcpConnection.connect(listener.metadata(), Rail(), Deadline(PATIENCE_S))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(Unreachable, match="accept"):
            listener.accept(PATIENCE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    far = listener.accept(PATIENCE_S)
    assert far is not None
    for end in (near, far, listener):
        end.close()


def test_a_vanished_peer_is_looked_for() -> None:
    listener = TcpListener("127.0.0.1", 0)
    near, far = open_pair(listener, Rail())
    assert far._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert all(end._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in (near, far))
    for end in (near, far, listener):
        end.close()
