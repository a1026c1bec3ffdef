"""Promises of reactor.py, with real descriptors and threads; only timers get a clock of their own."""

import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.protocol.errors import Closed, DeadlineExceeded, InvalidArgument
from kvstore.rpc.reactor import MIN_CANCELLED, READABLE, Reactor
from tests.rpc.wires import Clock, Looks

SECOND_NS = 1_000_000_000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reactor(clock: Clock) -> Iterator[Reactor]:
    reactor = Reactor(clock)
    yield reactor
    reactor.close()


@pytest.fixture
def running() -> Iterator[Reactor]:
    reactor = Reactor()
    thread = threading.Thread(target=reactor.run)
    thread.start()
    yield reactor
    reactor.stop()
    thread.join(10)
    assert not thread.is_alive()
    reactor.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_ready_descriptor_calls_back_until_unregistered(reactor: Reactor, pipe: tuple[int, int]) -> None:
    seen: list[int] = []
    reactor.register(pipe[0], seen.append)
    reactor.run_once(0)
    assert seen == []
    os.write(pipe[1], b"x")
    reactor.run_once(0)
    reactor.run_once(0)
    assert seen == [READABLE, READABLE]
    reactor.unregister(pipe[0])
    reactor.unregister(pipe[0])
    reactor.run_once(0)
    assert len(seen) == 2


def test_descriptor_unregistered_in_the_round_is_not_called(reactor: Reactor) -> None:
    """Both ends are ready in one round; the first callback closes the other and gives its number to a new, idle pipe."""
    first, second = os.pipe(), os.pipe()
    fresh: list[int] = []
    seen: list[int] = []

    def replace(mine: int, other: int) -> None:
        seen.append(mine)
        reactor.unregister(other)
        idle = os.pipe()
        os.dup2(idle[0], other)
        os.close(idle[0])
        fresh.append(idle[1])
        reactor.register(other, seen.append)

    reactor.register(first[0], lambda _: replace(first[0], second[0]))
    reactor.register(second[0], lambda _: replace(second[0], first[0]))
    for _, end in (first, second):
        os.write(end, b"x")
    reactor.run_once(0)
    assert len(seen) == 1
    for fd in (*first, *second, *fresh):
        os.close(fd)


def test_a_failing_callback_is_logged_and_the_others_still_run(
    reactor: Reactor, pipe: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: int) -> None:
        raise RuntimeError("a bad peer")

    done: list[str] = []
    os.write(pipe[1], b"x")
    reactor.register(pipe[0], fail)
    reactor.call_soon(fail)
    reactor.call_soon(lambda: done.append("soon"))
    reactor.call_later(0, fail)
    reactor.call_later(0, lambda: done.append("timer"))
    reactor.after_events += [fail, lambda: done.append("after")]
    with caplog.at_level(logging.ERROR):
        reactor.run_once(0)
    assert done == ["soon", "timer", "after"]
    assert len(caplog.records) == 4


def test_timers_run_in_the_order_of_their_time_and_not_before(reactor: Reactor, clock: Clock) -> None:
    done: list[int] = []
    for delay_s in (3, 1, 2):
        reactor.call_later(delay_s, lambda delay_s=delay_s: done.append(delay_s))  # type: ignore[misc]
    reactor.run_once(0)
    assert done == []
    clock.now_ns = 2 * SECOND_NS
    reactor.run_once(0)
    assert done == [1, 2]
    assert reactor.now_ns() == 2 * SECOND_NS


def test_cancelled_timers_are_removed_early_others_run(reactor: Reactor, clock: Clock) -> None:
    done: list[int] = []
    for number in range(100):
        reactor.call_later(number + 1, lambda number=number: done.append(number))  # type: ignore[misc]
    for _ in range(10_000):
        reactor.call_later(3600, lambda: done.append(-1)).cancel()
        assert len(reactor._timers) <= 2 * 100 + MIN_CANCELLED + 2
    clock.now_ns = 3601 * SECOND_NS
    reactor.run_once(0)
    assert done == list(range(100))
    assert reactor._timers == []


def test_what_repeats_does_not_crowd_after_a_late_call(reactor: Reactor, clock: Clock) -> None:
    done: list[int] = []
    reactor.every(1.0, lambda: done.append(clock.now_ns // SECOND_NS))
    for now_s in (1, 9, 9, 10):
        clock.now_ns = now_s * SECOND_NS
        reactor.run_once(0)
    assert done == [1, 9, 10]


def test_loop_and_periodic_callbacks_survive_memory_errors() -> None:
    starved: list[int] = []

    def now_ns() -> int:
        if starved:
            starved.pop()
            raise MemoryError
        return time.monotonic_ns()

    def repeated() -> None:
        calls.append(len(starved))
        if len(calls) == 1:
            starved.extend([0] * 9)
        if len(calls) == 3:
            reactor.stop()

    calls: list[int] = []
    reactor = Reactor(now_ns)
    reactor.every(0.001, repeated)
    starved.extend([0] * 9)
    reactor.run()
    assert (calls, starved) == ([0, 0, 0], [])
    reactor.close()


def test_callback_from_a_callback_waits_for_the_next_round(reactor: Reactor) -> None:
    done: list[int] = []
    reactor.call_soon(lambda: reactor.call_soon(lambda: done.append(1)))
    reactor.run_once(0)
    assert done == []
    reactor.run_once(0)
    assert done == [1]


@pytest.mark.parametrize("error", [InvalidArgument("no"), DeadlineExceeded("the catalog was late")])
def test_another_thread_gets_the_very_error_of_its_call(running: Reactor, error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        running.call(fail, deadline_s=10)
    assert raised.value is error


def test_call_that_misses_its_deadline_is_never_run(reactor: Reactor) -> None:
    done: list[int] = []
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        reactor.call(lambda: done.append(1), deadline_s=0.01)
    reactor.run_once(0)
    assert done == []


def test_a_closed_reactor_takes_no_calls(reactor: Reactor) -> None:
    reactor.close()
    reactor.close()
    reactor.call_soon(lambda: None)
    reactor.stop()
    with pytest.raises(Closed):
        reactor.call(lambda: None, deadline_s=1)


def test_stop_in_a_signal_handler_may_interrupt_call_soon(reactor: Reactor) -> None:
    """A handler runs in the loop's own thread, between any two steps of it: a plain lock would wait for itself."""
    with reactor._close_lock:
        reactor.stop()
    reactor.run()


@pytest.fixture
def looks() -> Looks:
    return Looks(1000)


@pytest.fixture
def looking(looks: Looks) -> Iterator[Reactor]:
    reactor = Reactor(busy_poll=looks)
    yield reactor
    reactor.close()


def test_busy_polling_starts_only_after_a_short_wait(looks: Looks, looking: Reactor, pipe: tuple[int, int]) -> None:
    seen: list[int] = []
    looking.register(pipe[0], seen.append)
    os.write(pipe[1], b"x")
    looking.run_once(10)
    assert (looks.told, seen) == (["slept"], [READABLE])
    looks.is_on = True
    looking.run_once(10)
    assert (looks.told, len(seen)) == (["slept", "found"], 2)


def test_busy_polling_reactor_serves_threads_and_timers(looks: Looks) -> None:
    reactor = Reactor(busy_poll=looks)
    looks.is_on = True
    rung = threading.Event()
    reactor.call_later(0.01, rung.set)
    thread = threading.Thread(target=reactor.run)
    thread.start()
    assert reactor.call(lambda: 7, deadline_s=10) == 7
    assert rung.wait(10)
    reactor.stop()
    thread.join(10)
    assert not thread.is_alive()
    reactor.close()
