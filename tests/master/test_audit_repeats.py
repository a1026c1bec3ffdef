"""Promises of repeats.py."""

from kvstore.master.audit_trail import MAX_KEYS, WINDOW_NS, Repeats


def test_first_is_reported_at_once_and_repeats_after_a_window() -> None:
    repeats = Repeats[str]()
    assert [repeats.is_first("a", now_ns) for now_ns in (0, 1, 2)] == [True, False, False]
    assert repeats.is_first("b", 5)
    assert list(repeats.due(WINDOW_NS - 1)) == []
    assert list(repeats.due(WINDOW_NS)) == [("a", 2)]
    assert list(repeats.due(2 * WINDOW_NS)) == [], "b was not repeated"
    assert repeats.is_first("a", 2 * WINDOW_NS)


def test_too_many_different_ones_are_counted_together() -> None:
    """The last of them stands for all."""
    repeats = Repeats[int]()
    assert sum(repeats.is_first(number, 0) for number in range(MAX_KEYS + 10)) == MAX_KEYS
    assert list(repeats.due(WINDOW_NS)) == [(MAX_KEYS + 9, 10)]
    assert repeats.is_first(0, WINDOW_NS)
