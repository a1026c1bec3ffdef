"""The pool of a blocking client against a real daemon."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from kvstore.client.config import ClientSettings
from kvstore.protocol.errors import Closed, DeadlineExceeded, TooManyConnections, Unauthorized, Unavailable
from kvstore.protocol.master_messages import Nodes
from kvstore.protocol.session_messages import Hello, Ok
from kvstore.rpc.address import Address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.client.connection_pool import ConnectionLease, ConnectionPool
from kvstore.rpc.deadline import Deadline
from tests.rpc.daemon_child import Daemon, running
from tests.rpc.wires import Item

HELLO = Hello(1, "tenant", "token", "me")
A = Address("a", 1)


def test_lease_released_within_a_call_closes_the_channel() -> None:
    for is_settled, error, stays in (
        (True, None, True),
        (True, DeadlineExceeded(""), True),
        (True, ValueError(), False),
        (False, None, False),
    ):
        item = Item(A)
        item.is_settled = is_settled
        kept: list[Item] = []
        loan = ConnectionLease(item, kept.append, reused=True)
        loan.release(error)
        loan.release(error)
        assert (item.is_open, kept) == (stays, [item])


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[Daemon, Address, Address]]:
    with running(tmp_path) as started:
        yield started


@pytest.fixture
def pool() -> Iterator[ConnectionPool]:
    pool = ConnectionPool(HELLO, ClientSettings(max_channels=2, idle_ttl_s=60, connect_timeout_s=60, busy_poll_us=0))
    yield pool
    pool.close()


Started = tuple[Daemon, Address, Address]


def test_a_channel_is_opened_with_hello_and_reused(daemon: Started, pool: ConnectionPool) -> None:
    for _ in range(3):
        with pool.take(daemon[1], Deadline(20)) as loan:
            assert loan.channel.call(Nodes(), Ok, Deadline(20)) == Ok()
    assert loan.reused
    assert [(hello.tenant, hello.token, hello.name) for hello in daemon[0].hellos] == [("tenant", "token", "me")]
    assert loan.channel.welcome.epoch == 42


def test_a_new_channel_says_what_its_taker_wants_it_to(daemon: Started, pool: ConnectionPool) -> None:
    other = Hello(1, "tenant", name="me", ticket=b"a ticket")
    for _ in range(2):
        pool.take(daemon[1], Deadline(20), other).release()
    assert daemon[0].hellos == [other], "one that is open has said it"


def test_a_taker_beyond_the_maximum_waits_for_one_given_back(daemon: Started, pool: ConnectionPool) -> None:
    first, second = pool.take(daemon[2], Deadline(20)), pool.take(daemon[2], Deadline(20))
    taken: list[ConnectionLease[Channel]] = []
    waiter = threading.Thread(target=lambda: taken.append(pool.take(daemon[2], Deadline(20))))
    waiter.start()
    while not pool._state.waiting(daemon[2]):
        assert waiter.is_alive()
    first.release()
    waiter.join()
    [third] = taken
    assert third.reused
    with pytest.raises(DeadlineExceeded):
        pool.take(daemon[2], Deadline(0.01))
    second.release()
    third.release()


def test_a_waiter_hears_that_the_pool_was_closed(daemon: Started, pool: ConnectionPool) -> None:
    loans = [pool.take(daemon[2], Deadline(20)) for _ in range(2)]
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            pool.take(daemon[2], Deadline(20))
        except Closed as error:
            heard.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not pool._state.waiting(daemon[2]):
        assert waiter.is_alive()
    pool.close()
    waiter.join()
    assert len(heard) == 1
    for loan in loans:
        loan.release()
        assert not loan.channel.is_open


def test_a_refusal_is_passed_on_and_counts_no_loan(daemon: Started, pool: ConnectionPool) -> None:
    daemon[0].refusal = Unauthorized("no")
    for _ in range(5):
        with pytest.raises(Unauthorized):
            pool.take(daemon[1], Deadline(20))
    assert pool.counts(daemon[1]) == (0, 0)


def test_silent_address_is_unavailable_before_the_deadline() -> None:
    pool = ConnectionPool(HELLO, ClientSettings(max_channels=2, idle_ttl_s=60, connect_timeout_s=0.2, busy_poll_us=0))
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(Unavailable, match="does not answer"):
        pool.take(Address("127.0.0.1", server.getsockname()[1]), Deadline(60))
    pool.close()


def test_a_deadline_shorter_than_the_connect_timeout_is_exceeded(pool: ConnectionPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(DeadlineExceeded):
        pool.take(Address("127.0.0.1", server.getsockname()[1]), Deadline(0.02))


def test_a_channel_is_borrowed_only_where_one_is_idle(daemon: Started, pool: ConnectionPool) -> None:
    assert pool.borrow(daemon[1]) is None
    pool.take(daemon[1], Deadline(20)).release()
    borrowed = pool.borrow(daemon[1])
    assert borrowed is not None
    assert pool.counts(daemon[1]) == (1, 0)
    assert pool.borrow(daemon[1]) is None
    permit, channel = borrowed
    pool.release(permit, channel)
    assert pool.counts(daemon[1]) == (0, 1)


def test_borrowed_channel_acts_as_a_lease_when_interrupted(daemon: Started, pool: ConnectionPool) -> None:
    pool.take(daemon[1], Deadline(20)).release()
    permit, channel = pool.borrow(daemon[1]) or (None, None)
    assert permit is not None
    assert channel is not None
    pool.lent(permit, channel).release(KeyboardInterrupt())
    assert not channel.is_open
    assert pool.counts(daemon[1]) == (0, 0)


@pytest.mark.promise("resources-exhausted")
def test_no_thread_starves_behind_others(daemon: Started, pool: ConnectionPool) -> None:
    """More threads than channels, each as fast as it can: all go on until each has had a channel several times."""
    threads_count, times = 12, 5
    done = [0] * threads_count
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            while min(done) < times and not errors:
                with pool.take(daemon[2], Deadline(30)) as loan:
                    loan.channel.call(Nodes(), Ok, Deadline(30))
                done[number] += 1
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(threads_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert min(done) >= times


def test_a_peer_that_takes_no_more_connections_is_shared(daemon: Started) -> None:
    """The daemon refuses the third: its caller waits for one of the two that there are."""
    pool = ConnectionPool(HELLO, ClientSettings(max_channels=9, idle_ttl_s=60, connect_timeout_s=60, busy_poll_us=0))
    loans = [pool.take(daemon[2], Deadline(20)) for _ in range(2)]
    daemon[0].refusal = TooManyConnections("all 2 connections are in use")
    taken: SimpleQueue[ConnectionLease[Channel]] = SimpleQueue()
    waiter = threading.Thread(target=lambda: taken.put(pool.take(daemon[2], Deadline(60))))
    waiter.start()
    while not pool._state.waiting(daemon[2]):
        assert waiter.is_alive()
    loans.pop().release()
    loans.append(taken.get(timeout=20))
    waiter.join()
    with pytest.raises(TooManyConnections):
        pool.take(daemon[1], Deadline(20))
    for loan in loans:
        loan.release()
    pool.close()
