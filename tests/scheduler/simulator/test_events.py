"""Promises of events.py."""

from kvstore.scheduler.simulator.job import EventQueue


def test_what_is_asked_for_happens_in_order_of_time_and_then_of_asking() -> None:
    events, seen = EventQueue(), list[tuple[float, str]]()
    for at_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        events.at(at_s, lambda name=name: seen.append((events.now_s, name)))  # type: ignore[misc]
    assert len(events) == 4
    events.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]
    assert len(events) == 0


def test_what_is_cancelled_does_not_happen_and_takes_no_time() -> None:
    events, seen = EventQueue(), list[int]()
    late = events.at(9.0, lambda: seen.append(9))
    events.at(1.0, lambda: seen.append(1))
    late.cancel()
    late.cancel()
    events.run()
    assert seen == [1]
    assert events.now_s == 1.0
