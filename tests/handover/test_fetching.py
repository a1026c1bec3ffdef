"""Promises of fetching.py: one fetch at a time, its end told in the reactor's thread, whatever becomes of the request or the store."""

import logging
import threading
from queue import SimpleQueue

import pytest

from kvstore.handover.fetching import Fetching
from kvstore.handover.handles import Receiving
from kvstore.protocol.errors import Cancelled, Closed, KVStoreError
from tests.handover.loop import running

Told = SimpleQueue[tuple[int, KVStoreError | None]]


def test_what_was_fetched_is_told_and_the_request_is_gone() -> None:
    with running() as reactor:
        fetching, told, handle = Fetching(reactor), Told(), Receiving(b"r", limit_s=1)
        go_on = threading.Event()
        reactor.call(lambda: fetching.begin(handle, lambda: 32 if go_on.wait(10) else 0, lambda *what: told.put(what)), deadline_s=10)
        assert b"r" in fetching
        assert fetching.handles() == [handle]
        go_on.set()
        assert told.get(timeout=10) == (32, None)
        assert b"r" not in fetching
        fetching.close()


def test_a_request_that_fails_meanwhile_is_over_after_the_fetch_with_the_first_reason() -> None:
    with running() as reactor:
        fetching, told, go_on = Fetching(reactor), Told(), threading.Event()
        handle = Receiving(b"r", limit_s=1)
        reactor.call(lambda: fetching.begin(handle, lambda: 16 * go_on.wait(10), lambda *what: told.put(what)), deadline_s=10)
        first = Cancelled("first")
        assert reactor.call(lambda: fetching.fail(b"r", first), deadline_s=10)
        assert reactor.call(lambda: fetching.fail(b"r", Closed("second")), deadline_s=10)
        assert not reactor.call(lambda: fetching.fail(b"other", first), deadline_s=10)
        assert told.empty()
        go_on.set()
        assert told.get(timeout=10) == (16, first)
        fetching.close()


def test_a_store_that_breaks_has_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with running() as reactor, caplog.at_level(logging.ERROR):
        fetching, told = Fetching(reactor), Told()
        reactor.call(lambda: fetching.begin(Receiving(b"r", limit_s=1), lambda: 1 // 0, lambda *what: told.put(what)), deadline_s=10)
        assert told.get(timeout=10) == (0, None)
        fetching.close()
    assert "a store of prefixes failed" in caplog.text
