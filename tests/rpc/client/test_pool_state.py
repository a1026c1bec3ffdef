"""Tests of pool_state.py, with plain objects for channels and times passed in."""

import weakref

import pytest

from kvstore.protocol.errors import Unreachable
from kvstore.rpc.address import Address
from kvstore.rpc.client.pool_state import HANDOVER_INTERVAL_NS, MIN_CHANNELS, RETRY_NS, ChannelPermit, PoolState, Waiter, close_all_in_child
from tests.rpc.wires import Item

A, B = Address("a", 1), Address("b", 1)
LATER_NS = 10 * HANDOVER_INTERVAL_NS


class Caller(Waiter[Item]):
    """Counts how often it is woken."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def make(*, max_channels: int = 9, max_open: int = 99, idle_ttl_s: float = 60, max_opening: int | None = None) -> PoolState[Item]:
    return PoolState(max_channels=max_channels, max_open=max_open, idle_ttl_s=idle_ttl_s, max_opening=max_opening)


def borrow(shelf: PoolState[Item], address: Address = A) -> tuple[ChannelPermit, Item | None]:
    permit, item = shelf.acquire(address)
    assert permit is not None
    return permit, item


def opened(shelf: PoolState[Item], address: Address = A) -> tuple[ChannelPermit, Item]:
    """A turn, and the new channel that it lacked."""
    permit, none = borrow(shelf, address)
    assert none is None
    item = Item(address)
    shelf.opened(item, permit)
    return permit, item


def queued(shelf: PoolState[Item], count: int) -> list[Caller]:
    callers = [Caller() for _ in range(count)]
    for caller in callers:
        assert shelf.acquire_or_queue(A, caller) == (None, None)
    assert shelf.waiting(A) == count
    return callers


def test_channel_given_back_last_is_lent_first() -> None:
    shelf = make()
    items, turns = [Item(A), Item(A)], [borrow(shelf), borrow(shelf)]
    assert [item for _, item in turns] == [None, None]
    for item, (permit, _) in zip(items, turns, strict=True):
        shelf.release(item, permit, 0)
    assert shelf.counts(A) == (0, 2)
    again, lent = borrow(shelf)
    assert lent is items[1]
    other, new = borrow(shelf, B)
    assert new is None
    assert shelf.counts(A) == (1, 1)
    assert (shelf.counts(Address("c", 1)), shelf.waiting(Address("c", 1))) == ((0, 0), 0)
    del again, other


def test_a_dropped_turn_is_over_and_its_channel_forgotten() -> None:
    shelf = make(max_channels=1)
    permit, item = opened(shelf)
    held = weakref.ref(item)
    del permit, item
    assert (shelf.counts(A), held()) == ((0, 0), None)
    borrow(shelf)


def test_idle_channels_are_closed_after_the_time_to_live() -> None:
    """Of all addresses."""
    shelf = make(idle_ttl_s=10)
    lent = [opened(shelf, address) for address in (A, A, B)]
    for (permit, item), now_ns in zip(lent, (0, 4_000_000_000, 10_000_000_000), strict=True):
        shelf.release(item, permit, now_ns)
    assert [item.is_open for _, item in lent] == [False, True, True]


def test_a_returned_channel_may_be_taken_past_those_that_wait() -> None:
    """Within the interval of a hand-over: the first caller is woken, finds nothing and keeps its place."""
    shelf = make(max_channels=1)
    permit, item = opened(shelf)
    first, second = queued(shelf, 2)
    shelf.release(item, permit, HANDOVER_INTERVAL_NS - 1)
    assert (first.woken, second.woken) == (1, 0)
    barging, lent = borrow(shelf)
    assert lent is item
    assert shelf.acquire_or_queue(A, first) == (None, None)
    shelf.release(item, barging, HANDOVER_INTERVAL_NS - 1)
    assert (first.woken, second.woken) == (2, 0)
    assert shelf.acquire_or_queue(A, first)[1] is item


def test_the_longest_wait_ends_with_a_hand_over_once_an_interval() -> None:
    shelf = make(max_channels=1)
    permit, item = opened(shelf)
    callers = queued(shelf, 3)
    now_ns = 0
    for caller in callers:
        now_ns += HANDOVER_INTERVAL_NS
        shelf.release(item, permit, now_ns)
        assert shelf.acquire(A) == (None, None), "nobody takes what was handed over"
        handed, lent = shelf.acquire_or_queue(A, caller)
        assert (lent, caller.woken >= 1) == (item, True)
        assert handed is not None
        shelf.leave(A, caller, now_ns)
        permit = handed
    assert shelf.waiting(A) == 0
    shelf.release(item, permit, now_ns + HANDOVER_INTERVAL_NS)
    assert shelf.counts(A) == (0, 1), "nobody waits"


def test_a_caller_that_leaves_passes_on_what_it_was_handed() -> None:
    shelf = make(max_channels=1)
    permit, item = opened(shelf)
    first, second = queued(shelf, 2)
    shelf.release(item, permit, LATER_NS)
    assert shelf.counts(A) == (1, 0)
    shelf.leave(A, first, LATER_NS)
    assert shelf.counts(A) == (0, 1)
    assert second.woken >= 1
    assert shelf.acquire_or_queue(A, second)[1] is item


def test_a_hand_over_that_was_interrupted_wakes_its_caller_later() -> None:
    """By a signal handler that raises between the hand-over and the wake-up: the caller is still in the queue."""

    class Interrupted(Caller):
        def wake(self) -> None:
            super().wake()
            if self.woken == 1:
                raise KeyboardInterrupt

    shelf = make(max_channels=2)
    (permit, item), (other_turn, other) = opened(shelf), opened(shelf)
    first, second = Interrupted(), Caller()
    for caller in (first, second):
        assert shelf.acquire_or_queue(A, caller) == (None, None)
    with pytest.raises(KeyboardInterrupt):
        shelf.release(item, permit, LATER_NS)
    shelf.release(other, other_turn, 2 * LATER_NS)
    assert (first.woken, shelf.acquire_or_queue(A, first)[1]) == (2, item)
    assert shelf.acquire_or_queue(A, second)[1] is other


def test_an_interrupted_hand_over_leaves_the_channel_to_others() -> None:
    """The only caller in the queue was handed a channel already: another one that returns is idle."""

    class Interrupted(Caller):
        def wake(self) -> None:
            super().wake()
            if self.woken == 1:
                raise KeyboardInterrupt

    shelf = make(max_channels=2)
    (permit, item), (other_turn, other) = opened(shelf), opened(shelf)
    caller = Interrupted()
    assert shelf.acquire_or_queue(A, caller) == (None, None)
    with pytest.raises(KeyboardInterrupt):
        shelf.release(item, permit, LATER_NS)
    shelf.release(other, other_turn, 2 * LATER_NS)
    assert (shelf.counts(A), shelf.waiting(A)) == ((1, 1), 0)


def test_no_more_than_max_open_are_open_to_all_addresses() -> None:
    """But for a few to each address, which an operation that holds one to another address may need."""
    shelf = make(max_open=MIN_CHANNELS + 2)
    lent = [opened(shelf) for _ in range(MIN_CHANNELS + 2)]
    assert shelf.acquire(A) == (None, None)
    elsewhere = [borrow(shelf, B) for _ in range(MIN_CHANNELS)]
    assert shelf.acquire(B) == (None, None)
    assert shelf.counts(A) == (len(lent), 0)
    del elsewhere


def test_idle_channels_elsewhere_are_closed_for_a_new_one() -> None:
    """The oldest first."""
    shelf = make(max_open=3)
    lent = [opened(shelf) for _ in range(3)]
    for now_ns, (permit, item) in enumerate(lent):
        shelf.release(item, permit, now_ns)
    permit, _ = borrow(shelf, B)
    assert [item.is_open for _, item in lent] == [False, True, True]
    others = [borrow(shelf, B) for _ in range(MIN_CHANNELS - 1)]
    assert [item.is_open for _, item in lent] == [False, False, False]
    del permit, others


def test_without_descriptors_callers_wait_for_open_channels() -> None:
    """For a while: then twice as many are opened, and so on up to the limit."""
    shelf = make(max_channels=3)
    (permit, item), (failed, _) = opened(shelf), borrow(shelf)
    assert shelf.open_refused(A, failed, 0)
    [caller] = queued(shelf, 1)
    shelf.release(item, permit, 1)
    waited, lent = shelf.acquire_or_queue(A, caller)
    assert lent is item
    assert waited is not None
    shelf.leave(A, caller, 1)
    assert shelf.acquire(A) == (None, None)
    shelf.release(item, waited, RETRY_NS)
    again = [borrow(shelf) for _ in range(2)]
    assert [each for _, each in again] == [item, None]
    assert shelf.acquire(A) == (None, None)
    shelf.release(item, again[0][0], 2 * RETRY_NS)
    again = [again[1], *(borrow(shelf) for _ in range(2))]
    assert shelf.counts(A) == (3, 0)
    shelf.release(item, again[1][0], 9 * RETRY_NS)


def test_no_more_than_max_opening_are_opened_at_once() -> None:
    """A channel that has opened lets the next caller open one."""
    shelf = make(max_opening=2)
    opening = [borrow(shelf) for _ in range(2)]
    first, second = queued(shelf, 2)
    item = Item(A)
    shelf.opened(item, opening[0][0])
    assert (first.woken, second.woken) == (1, 0)
    permit, none = shelf.acquire_or_queue(A, first)
    assert permit is not None
    assert none is None
    assert shelf.acquire_or_queue(A, second) == (None, None)
    shelf.release(item, opening[0][0], 0)
    assert shelf.acquire_or_queue(A, second)[1] is item


def test_waiting_callers_share_a_failed_connect() -> None:
    """Unless a channel is open: then they wait for it."""
    shelf = make(max_opening=1)
    permit, _ = borrow(shelf)
    callers = queued(shelf, 2)
    shelf.not_opened(A, permit, Unreachable("no route"))
    for caller in callers:
        with pytest.raises(Unreachable, match="no route"):
            shelf.acquire_or_queue(A, caller)
        shelf.leave(A, caller, 0)
    lent, item = opened(shelf)
    permit, _ = borrow(shelf)
    [caller] = queued(shelf, 1)
    shelf.not_opened(A, permit, Unreachable("no route"))
    shelf.release(item, lent, 0)
    assert shelf.acquire_or_queue(A, caller)[1] is item


def test_a_forked_child_closes_its_copies_of_all_channels() -> None:
    shelf = make()
    (permit, idle), (lent_turn, lent), (opening, _) = opened(shelf), opened(shelf), borrow(shelf)
    shelf.release(idle, permit, 0)
    close_all_in_child()
    assert (idle.is_open, lent.is_open, shelf.is_closed) == (False, False, True)
    del lent_turn, opening
