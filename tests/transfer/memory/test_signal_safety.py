"""Promises of signal_safety.py: gates, events and shields hold for every exception of a signal handler."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from kvstore.testing.transfer.awaited import PATIENCE_S, in_background, is_quiet
from kvstore.transfer.memory import signal_safety as latch_module
from kvstore.transfer.memory import signal_safety as module
from kvstore.transfer.memory.signal_safety import Gate, Shield, UninterruptibleEvent, shielded


def test_a_gate_that_is_shut_lets_nobody_in() -> None:
    gate = Gate()
    done: list[int] = []
    assert gate.run_inside(lambda: done.append(1))
    gate.close_and_wait()
    assert not gate.run_inside(lambda: done.append(2))
    assert done == [1]


@pytest.mark.promise("interrupts-safe")
def test_gate_close_waits_for_all_inside() -> None:
    gate, inside, go_on = Gate(), threading.Barrier(3), threading.Event()
    left: list[int] = []

    def work() -> None:
        inside.wait()
        go_on.wait()
        left.append(1)

    threads = [threading.Thread(target=gate.run_inside, args=(work,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    threading.Timer(0.01, go_on.set).start()
    gate.close_and_wait()
    assert left == [1, 1]
    for thread in threads:
        thread.join()


class Struck(BaseException):
    pass


@pytest.fixture
def strikes() -> Iterator[None]:
    """While it lasts, SIGALRM raises."""

    def strike(number: int, frame: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_event_set_wakes_all_waiters() -> None:
    event = UninterruptibleEvent(60)
    waiting = [in_background(event.wait) for _ in range(3)]
    assert all(is_quiet(one) for one in waiting)
    assert not event.wait(0)
    assert not event.wait(-1)
    assert not event.is_set
    event.set()
    event.set()
    assert [one.result(10) for one in waiting] == [True] * 3
    assert event.is_set
    assert event.wait(0)
    event.wait_uninterruptibly()


@pytest.mark.usefixtures("strikes")
def test_a_wait_is_ended_by_what_a_signal_handler_raises() -> None:
    event = UninterruptibleEvent(60)
    with pytest.raises(Struck):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        event.wait(30)
    assert not event.wait(0)
    event.set()
    assert event.wait()


def test_to_sit_out_ends_at_the_limit() -> None:
    event = UninterruptibleEvent(0.01)
    began_ns = time.monotonic_ns()
    event.wait_uninterruptibly()
    assert time.monotonic_ns() - began_ns < 30 * 1_000_000_000
    assert not event.is_set


@pytest.mark.skipif(not latch_module._HAS_CLOCKWRLOCK, reason="this C library waits by the wall clock alone")
def test_a_step_of_the_wall_clock_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)  # as if it had been set since, by half a century
    event = UninterruptibleEvent(60)
    monkeypatch.undo()
    waiting = in_background(event.wait_uninterruptibly)
    assert is_quiet(waiting)
    event.set()
    waiting.result(10)


def test_event_waits_by_the_wall_clock_without_clockwrlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latch_module, "_HAS_CLOCKWRLOCK", False)
    UninterruptibleEvent(0.01).wait_uninterruptibly()
    event = UninterruptibleEvent(60)
    waiting = in_background(event.wait_uninterruptibly)
    assert is_quiet(waiting)
    event.set()
    waiting.result(10)


class ShieldStruck(Exception):
    pass


class Handler:
    """Counts calls, and raises the given number of times."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.raises = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.calls.append(number)
        if self.raises:
            raise ShieldStruck(len(self.calls))


@pytest.fixture
def handler() -> Iterator[Handler]:
    handler = Handler()
    before = {number: signal.signal(number, handler) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield handler
    assert signal.getsignal(signal.SIGUSR1) is signal.getsignal(signal.SIGUSR2) is handler, "the program has its handlers back"
    for number, other in before.items():
        signal.signal(number, other)


def strike(number: signal.Signals = signal.SIGUSR1) -> None:
    signal.raise_signal(number)


@pytest.mark.promise("interrupts-safe")
def test_what_is_raised_comes_at_the_end_and_once(handler: Handler) -> None:
    steps = []
    with pytest.raises(ShieldStruck, match="1"), Shield() as shield:
        strike()
        steps.append("one")
        strike(signal.SIGUSR2)
        steps.append("two")
        assert isinstance(shield.raised, ShieldStruck)
    assert steps == ["one", "two"]
    assert handler.calls == [signal.SIGUSR1, signal.SIGUSR2], "handlers run when the signal comes"
    with pytest.raises(ShieldStruck):
        strike()


def test_the_inner_shield_raises_first_and_the_outer_goes_on(handler: Handler) -> None:
    with Shield() as outer:
        with pytest.raises(ShieldStruck), Shield():
            strike()
        assert outer.raised is None
        strike()
        assert outer.raised is not None
        outer.raised = None


def test_shield_raises_the_handlers_exception_first(handler: Handler) -> None:
    with pytest.raises(ShieldStruck) as caught, Shield():
        strike()
        raise KeyError
    assert isinstance(caught.value.__context__, KeyError)


def test_what_is_raised_cancels_the_work_from_another_thread(handler: Handler) -> None:
    cancelled, threads = threading.Event(), []

    def cancel() -> None:
        threads.append(threading.get_ident())
        cancelled.set()

    with pytest.raises(ShieldStruck), Shield() as shield:
        shield.cancels(cancel)
        strike()
        assert cancelled.wait(PATIENCE_S)
    assert threads != [threading.get_ident()]


def test_shield_work_continues_without_a_cancel_thread(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", no_thread)
    steps = []
    with pytest.raises(ShieldStruck, match="1"), Shield() as shield:
        shield.cancels(lambda: steps.append("cancelled"))
        strike()
        steps.append("went on")
    assert steps == ["went on"]


def test_a_handler_that_chooses_its_successor_is_succeeded_by_it(handler: Handler) -> None:
    successor = Handler()

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(number, successor)

    signal.signal(signal.SIGUSR1, first)
    with pytest.raises(ShieldStruck), Shield():
        strike()
        strike()
    assert len(successor.calls) == 1
    assert signal.getsignal(signal.SIGUSR1) is successor
    signal.signal(signal.SIGUSR1, handler)


def test_shield_keeps_a_handler_reset_to_default(handler: Handler) -> None:
    signal.signal(signal.SIGUSR1, lambda number, frame: signal.signal(number, signal.SIG_IGN))
    with Shield():
        strike()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    signal.signal(signal.SIGUSR1, handler)


def test_other_threads_have_no_shield_and_change_no_handler(handler: Handler) -> None:
    def run() -> object:
        with Shield() as shield:
            assert shield.raised is None
            return signal.getsignal(signal.SIGUSR1)

    assert in_background(run).result(PATIENCE_S) is handler


def test_shield_interrupted_on_entry_restores_the_handlers(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_of = module._defer_signal

    def struck(number: int, replaced: object) -> None:
        keep_of(number, replaced)  # type: ignore[arg-type]
        if number == signal.SIGUSR1:
            strike()

    monkeypatch.setattr(module, "_defer_signal", struck)
    with pytest.raises(ShieldStruck), Shield():
        raise AssertionError("it did not go up")


def test_shield_leaves_a_handler_removed_on_entry(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    look = module._handler_of

    def ignored_from_now_on(number: int) -> object:
        found = look(number)
        if number == signal.SIGUSR1:
            signal.signal(number, signal.SIG_IGN)
        return found

    monkeypatch.setattr(module, "_handler_of", ignored_from_now_on)
    with Shield():
        strike()
    assert not handler.calls
    assert signal.signal(signal.SIGUSR1, handler) is signal.SIG_IGN


def test_shield_interrupted_on_exit_raises_and_the_next_restores(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    restore_handlers = module._restore_handlers

    with monkeypatch.context() as patch, pytest.raises(ShieldStruck, match="1"), Shield():
        strike()
        patch.setattr(module, "_restore_handlers", strike)
    with pytest.raises(ShieldStruck):
        strike()
    assert signal.getsignal(signal.SIGUSR1) is not handler
    assert restore_handlers is module._restore_handlers
    with Shield():
        pass


def test_a_shielded_function_is_done_before_anything_is_raised(handler: Handler) -> None:
    done = []

    @shielded
    def act(number: int, *, more: int) -> None:
        strike()
        done.append(number + more)

    with pytest.raises(ShieldStruck):
        act(1, more=2)
    assert done == [3]


def test_a_process_forked_by_another_thread_has_no_shield_up(handler: Handler) -> None:
    def fork() -> int:
        child = os.fork()
        if not child:
            status = 1
            try:
                strike()
            except ShieldStruck:
                status = 0 if signal.getsignal(signal.SIGUSR1) is handler else 2
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    with Shield():
        assert in_background(fork).result(PATIENCE_S) == 0


def test_fork_deactivates_only_shields_of_other_threads(handler: Handler) -> None:
    with pytest.raises(ShieldStruck), Shield() as shield:
        module._after_fork()  # as in a child that the handler forked
        strike()
        assert shield.raised is not None
        shield.thread_id += 1
        module._after_fork()
        assert signal.getsignal(signal.SIGUSR1) is handler
    module._after_fork()
