"""Promises of the gate."""

import threading

from kvstore.transfer.memory.signal_safety import Gate


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
