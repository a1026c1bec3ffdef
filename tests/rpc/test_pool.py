"""The bookkeeping on its own, then the pool against a real daemon."""

import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from kvstore.protocol.errors import Closed, DeadlineExceeded, InvalidArgument, Unauthorized, Unavailable
from kvstore.protocol.master_messages import Nodes
from kvstore.protocol.session_messages import Hello, Ok, Welcome
from kvstore.rpc.address import Address
from kvstore.rpc.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.pool import Loan, Pool, Shelf, Turn, connect_failed
from tests.ports import free_ports
from tests.rpc.daemon_child import Daemon, running
from tests.rpc.wires import Looks, counted

HELLO = Hello(1, "tenant", "token", "me")
A, B = Address("a", 1), Address("b", 1)


class Item:
    """What the shelf needs of a channel."""

    def __init__(self, address: Address = A) -> None:
        self.address = address
        self.is_open = self.is_settled = True
        self.welcome = Welcome(1, "x")

    def close(self) -> None:
        self.is_open = False


def borrow(shelf: Shelf[Item], address: Address = A) -> tuple[Turn, Item | None]:
    turn, item = shelf.lend(address)
    assert turn is not None
    return turn, item


def test_the_last_given_back_is_the_first_lent() -> None:
    shelf: Shelf[Item] = Shelf(max_channels=9, idle_ttl_s=60)
    items, turns = [Item(), Item()], [borrow(shelf), borrow(shelf)]
    assert [item for _, item in turns] == [None, None]
    for item, (turn, _) in zip(items, turns, strict=True):
        shelf.give_back(item, turn, 0)
    assert shelf.counts(A) == (0, 2)
    again, lent = borrow(shelf)
    assert lent is items[1]
    other, opened = borrow(shelf, B)
    assert opened is None
    assert shelf.counts(A) == (1, 1)
    assert shelf.counts(Address("c", 1)) == (0, 0)
    del again, other


def test_no_more_than_the_maximum_is_lent_to_one_address() -> None:
    shelf: Shelf[Item] = Shelf(max_channels=1, idle_ttl_s=60)
    turn, _ = borrow(shelf)
    assert shelf.lend(A) == (None, None)
    borrow(shelf, B)
    assert (shelf.free(A), shelf.free(Address("c", 1))) == (0, 1)
    shelf.not_opened(A, turn)
    borrow(shelf)


def test_a_borrower_who_opens_none_gets_only_what_is_idle() -> None:
    shelf: Shelf[Item] = Shelf(max_channels=1, idle_ttl_s=60)
    assert shelf.lend(A, opens=False) == (None, None)
    turn, _ = borrow(shelf)
    item = Item()
    shelf.give_back(item, turn, 0)
    turn_2, lent = shelf.lend(A, opens=False)
    assert (turn_2 is not None, lent) == (True, item)
    assert shelf.lend(A, opens=False) == (None, None)


def test_a_turn_that_is_dropped_is_over_and_its_channel_is_the_shelfs_no_more() -> None:
    shelf: Shelf[Item] = Shelf(max_channels=1, idle_ttl_s=60)
    turn, _ = borrow(shelf)
    item = Item()
    shelf.opened(item, turn)
    held = weakref.ref(item)
    del turn, item
    assert (shelf.counts(A), held()) == ((0, 0), None)
    borrow(shelf)


def test_broken_channels_are_dropped() -> None:
    shelf: Shelf[Item] = Shelf(max_channels=1, idle_ttl_s=60)
    turn, _ = borrow(shelf)
    broken = Item()
    broken.close()
    shelf.give_back(broken, turn, 0)
    assert shelf.counts(A) == (0, 0)


def test_channels_idle_for_the_time_to_live_are_closed_whatever_their_address() -> None:
    shelf: Shelf[Item] = Shelf(max_channels=9, idle_ttl_s=10)
    old, young, other = Item(), Item(), Item(B)
    turns = [borrow(shelf, item.address)[0] for item in (old, young, other)]
    for item, turn, now_ns in zip((old, young, other), turns, (0, 4_000_000_000, 10_000_000_000), strict=True):
        shelf.give_back(item, turn, now_ns)
    assert [item.is_open for item in (old, young, other)] == [False, True, True]


def test_a_closed_shelf_closes_the_idle_at_once_and_the_lent_when_they_come_back() -> None:
    shelf: Shelf[Item] = Shelf(max_channels=9, idle_ttl_s=10)
    idle, lent = Item(), Item()
    (first, _), (second, _) = borrow(shelf), borrow(shelf)
    shelf.give_back(idle, first, 0)
    shelf.close()
    assert (idle.is_open, lent.is_open) == (False, True)
    shelf.give_back(lent, second, 0)
    assert not lent.is_open
    with pytest.raises(Closed):
        shelf.lend(A)


def test_a_channel_given_back_within_a_call_is_closed_whatever_was_raised() -> None:
    for is_settled, error, stays in (
        (True, None, True),
        (True, DeadlineExceeded(""), True),
        (True, ValueError(), False),
        (False, None, False),
    ):
        item = Item()
        item.is_settled = is_settled
        kept: list[Item] = []
        loan = Loan(item, kept.append, reused=True)
        loan.give_back(error)
        loan.give_back(error)
        assert (item.is_open, kept) == (stays, [item])


def test_an_attempt_that_ran_out_of_time_is_the_operations_end_only_if_its_deadline_is_over() -> None:
    error = DeadlineExceeded("slow")
    assert connect_failed(error, A, Deadline(0.0)) is error
    assert isinstance(connect_failed(error, A, Deadline(5.0)), Unavailable)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[Daemon, Address, Address]]:
    with running(tmp_path) as started:
        yield started


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(HELLO, max_channels=2, idle_ttl_s=60, connect_timeout_s=60)
    yield pool
    pool.close()


Started = tuple[Daemon, Address, Address]


def test_a_channel_is_opened_with_hello_and_reused(daemon: Started, pool: Pool) -> None:
    for _ in range(3):
        with pool.take(daemon[1], Deadline(20)) as loan:
            assert loan.channel.call(Nodes(), Ok, Deadline(20)) == Ok()
    assert loan.reused
    assert [(hello.tenant, hello.token, hello.name) for hello in daemon[0].hellos] == [("tenant", "token", "me")]
    assert loan.channel.welcome.epoch == 42


def test_a_new_channel_says_what_its_taker_wants_it_to(daemon: Started, pool: Pool) -> None:
    other = Hello(1, "tenant", name="me", ticket=b"a ticket")
    for _ in range(2):
        pool.take(daemon[1], Deadline(20), other).give_back()
    assert daemon[0].hellos == [other], "one that is open has said it"


def test_channels_of_a_pool_learn_together_when_to_look(daemon: Started, pool: Pool) -> None:
    pool._busy_poll = looks = Looks(50)
    with pool.take(daemon[1], Deadline(5)) as first, pool.take(daemon[1], Deadline(5)) as second:
        for loan in (first, second):
            assert loan.channel.call(Nodes(), Ok, Deadline(5)) == Ok()
    assert len(looks.told) == 4, "a Hello and a call each"


def test_giving_back_twice_lends_once(daemon: Started, pool: Pool) -> None:
    loan = pool.take(daemon[1], Deadline(20))
    loan.give_back()
    loan.give_back()
    assert pool.counts(daemon[1]) == (0, 1)


def test_a_kvstore_error_keeps_the_channel_and_any_other_closes_it(daemon: Started, pool: Pool) -> None:
    with pytest.raises(InvalidArgument), pool.take(daemon[1], Deadline(20)):
        raise InvalidArgument("the caller's")
    assert pool.counts(daemon[1]) == (0, 1)
    with pytest.raises(KeyboardInterrupt), pool.take(daemon[1], Deadline(20)):
        raise KeyboardInterrupt
    assert pool.counts(daemon[1]) == (0, 0)


def test_a_discarded_channel_is_closed(daemon: Started, pool: Pool) -> None:
    loan = pool.take(daemon[1], Deadline(20))
    loan.discard()
    assert not loan.channel.is_open
    assert pool.counts(daemon[1]) == (0, 0)


def test_a_taker_beyond_the_maximum_waits_for_one_given_back(daemon: Started, pool: Pool) -> None:
    first, second = pool.take(daemon[2], Deadline(20)), pool.take(daemon[2], Deadline(20))
    taken: list[Loan[Channel]] = []
    waiter = threading.Thread(target=lambda: taken.append(pool.take(daemon[2], Deadline(20))))
    waiter.start()
    while not pool._waiting[daemon[2]]:
        assert waiter.is_alive()
    first.give_back()
    waiter.join()
    [third] = taken
    assert third.reused
    with pytest.raises(DeadlineExceeded):
        pool.take(daemon[2], Deadline(0.01))
    second.give_back()
    third.give_back()


def test_a_return_wakes_the_first_of_those_who_wait_and_nobody_else(daemon: Started, pool: Pool) -> None:
    asked = counted(pool._shelf)
    held, elsewhere = [pool.take(daemon[2], Deadline(20)) for _ in range(2)], [pool.take(daemon[1], Deadline(20)) for _ in range(2)]
    taken: SimpleQueue[tuple[int, Loan[Channel]]] = SimpleQueue()

    def start(number: int, address: Address) -> threading.Thread:
        thread = threading.Thread(target=lambda: taken.put((number, pool.take(address, Deadline(20)))))
        thread.start()
        while len(pool._waiting[address]) <= number:
            assert thread.is_alive()
        return thread

    threads = [start(number, daemon[2]) for number in range(8)]
    threads.append(start(0, daemon[1]))
    for number in range(8):
        held.pop().give_back()
        got, loan = taken.get(timeout=20)
        assert got == number
        held.append(loan)
    elsewhere.pop().give_back()
    elsewhere.append(taken.get(timeout=20)[1])
    for thread in threads:
        thread.join()
    assert len(asked) == 4 + 9 * 3, "when they came, when they lay down, and when they were woken"
    for loan in (*held, *elsewhere):
        loan.give_back()


def test_who_was_woken_and_does_not_go_on_wakes_the_next(daemon: Started, pool: Pool) -> None:
    loans = [pool.take(daemon[2], Deadline(20)) for _ in range(2)]
    taken: SimpleQueue[Loan[Channel]] = SimpleQueue()
    waiter = threading.Thread(target=lambda: taken.put(pool.take(daemon[2], Deadline(600))))

    class Interrupted(Deadline):
        """The signal comes right after the channel."""

        def left_s(self) -> float:
            waiter.start()
            while len(pool._waiting[daemon[2]]) < 2:
                assert waiter.is_alive()
            loans.pop().give_back()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.take(daemon[2], Interrupted(20))
    loans.append(taken.get(timeout=20))
    waiter.join()
    assert not pool._waiting[daemon[2]]
    for loan in loans:
        loan.give_back()


def test_a_channel_that_could_not_be_opened_is_the_turn_of_who_waits_for_that_address(daemon: Started) -> None:
    """Though another, who waits for another address, has waited longer."""
    pool = Pool(HELLO, max_channels=1, idle_ttl_s=60, connect_timeout_s=60)
    lent = pool.take(daemon[1], Deadline(20))
    heard: SimpleQueue[Exception | Loan[Channel]] = SimpleQueue()

    def take(address: Address) -> None:
        try:
            heard.put(pool.take(address, Deadline(10)))
        except (Unavailable, DeadlineExceeded) as error:
            heard.put(error)

    def start(address: Address) -> threading.Thread:
        thread = threading.Thread(target=take, args=(address,))
        thread.start()
        return thread

    with socket.create_server(("127.0.0.1", 0)) as server:
        broken = Address("127.0.0.1", server.getsockname()[1])
        threads = [start(broken)]
        opening, _ = server.accept()
        for address in (daemon[1], broken):
            threads.append(start(address))
            while not pool._waiting[address]:
                assert threads[-1].is_alive()
    opening.close()
    assert [type(heard.get(timeout=20)) for _ in range(2)] == [Unavailable, Unavailable]
    lent.give_back()
    last = heard.get(timeout=20)
    assert isinstance(last, Loan)
    last.give_back()
    for thread in threads:
        thread.join(20)
    pool.close()


def test_a_waiter_hears_that_the_pool_was_closed(daemon: Started, pool: Pool) -> None:
    loans = [pool.take(daemon[2], Deadline(20)) for _ in range(2)]
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            pool.take(daemon[2], Deadline(20))
        except Closed as error:
            heard.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not pool._waiting[daemon[2]]:
        assert waiter.is_alive()
    pool.close()
    waiter.join()
    assert len(heard) == 1
    for loan in loans:
        loan.give_back()
        assert not loan.channel.is_open


def test_a_refusal_is_passed_on_and_counts_no_loan(daemon: Started, pool: Pool) -> None:
    daemon[0].refusal = Unauthorized("no")
    for _ in range(5):
        with pytest.raises(Unauthorized):
            pool.take(daemon[1], Deadline(20))
    assert pool.counts(daemon[1]) == (0, 0)


def test_nobody_there_is_unavailable(pool: Pool) -> None:
    with pytest.raises(Unavailable):
        pool.take(Address("127.0.0.1", free_ports(1)[0]), Deadline(20))


def test_an_address_that_accepts_and_says_nothing_is_unavailable_before_the_deadline() -> None:
    pool = Pool(HELLO, max_channels=2, idle_ttl_s=60, connect_timeout_s=0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(Unavailable, match="does not answer"):
        pool.take(Address("127.0.0.1", server.getsockname()[1]), Deadline(60))
    pool.close()


def test_a_deadline_shorter_than_the_connect_timeout_is_exceeded(pool: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(DeadlineExceeded):
        pool.take(Address("127.0.0.1", server.getsockname()[1]), Deadline(0.02))


def test_a_channel_is_borrowed_only_where_one_is_idle(daemon: Started, pool: Pool) -> None:
    assert pool.borrow(daemon[1]) is None
    pool.take(daemon[1], Deadline(20)).give_back()
    borrowed = pool.borrow(daemon[1])
    assert borrowed is not None
    assert pool.counts(daemon[1]) == (1, 0)
    assert pool.borrow(daemon[1]) is None
    turn, channel = borrowed
    pool.give_back(turn, channel)
    assert pool.counts(daemon[1]) == (0, 1)


def test_what_was_borrowed_goes_as_a_loan_does_where_a_call_was_interrupted(daemon: Started, pool: Pool) -> None:
    pool.take(daemon[1], Deadline(20)).give_back()
    turn, channel = pool.borrow(daemon[1]) or (None, None)
    assert turn is not None
    assert channel is not None
    pool.lent(turn, channel).give_back(KeyboardInterrupt())
    assert not channel.is_open
    assert pool.counts(daemon[1]) == (0, 0)
