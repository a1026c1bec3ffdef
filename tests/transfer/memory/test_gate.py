"""Promises of the gate."""

import threading

from kvstore.transfer.memory.signal_safety import Gate
from kvstore.transfer.testing.waiting import PATIENCE_S, in_background, is_quiet


def test_a_gate_that_is_shut_lets_nobody_in() -> None:
    gate = Gate()
    done: list[int] = []
    assert gate.pass_through(lambda: done.append(1))
    gate.shut()
    assert not gate.pass_through(lambda: done.append(2))
    assert done == [1]


def test_shutting_waits_for_all_who_are_inside() -> None:
    gate, inside, go_on = Gate(), threading.Barrier(3), threading.Event()
    left: list[int] = []

    def work() -> None:
        inside.wait()
        go_on.wait()
        left.append(1)

    threads = [threading.Thread(target=gate.pass_through, args=(work,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    threading.Timer(0.01, go_on.set).start()
    gate.shut()
    assert left == [1, 1]
    for thread in threads:
        thread.join()


def test_who_leaves_by_an_exception_has_left() -> None:
    gate = Gate()
    raised: list[BaseException] = []

    def fail() -> None:
        try:
            gate.pass_through(lambda: 1 / 0)  # type: ignore[arg-type]
        except ZeroDivisionError as error:
            raised.append(error)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    gate.shut()
    assert len(raised) == 1


def test_who_entered_in_one_thread_may_leave_in_another() -> None:
    gate = Gate()
    assert gate.enter()
    shutting = in_background(gate.shut)
    assert is_quiet(shutting)
    gate.leave()
    shutting.result(PATIENCE_S)
    assert not gate.enter()
