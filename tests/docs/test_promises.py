"""Tests of docs/promises.md: every promise has a test, and every marker names a promise."""

from docs.make_promises import marked_tests, promises


def test_promises_have_distinct_ids() -> None:
    ids = promises()
    assert len(ids) > 40
    assert len(set(ids)) == len(ids)


def test_every_promise_has_a_marked_test() -> None:
    assert set(promises()) - {promise for promise, _ in marked_tests()} == set()


def test_every_marker_names_a_promise() -> None:
    known = set(promises())
    assert [(promise, test) for promise, test in marked_tests() if promise not in known] == []
