"""Promises of prefix_fetches.py: one fetch at a time, within its request's deadline, and none once its request is over."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from kvstore.handover.handles import ReceiveHandle
from kvstore.handover.receiving.prefix_fetches import Fetch, PrefixFetches
from kvstore.protocol.errors import Cancelled, KVStoreError
from kvstore.rpc.reactor import Reactor

SECOND_NS = 1_000_000_000
FENCE_S = 5.0
FENCED, NOT_FENCED = True, False


class Clock:
    now_ns = 0


class Scene:
    """Fetches on a clock of their own, whose reactor the test runs."""

    def __init__(self, share: float) -> None:
        self.clock = Clock()
        self.reactor = Reactor(lambda: self.clock.now_ns)
        self.fetches = PrefixFetches(self.reactor, FENCE_S, share)
        self.told: list[tuple[bytes, int, KVStoreError | None, bool]] = []
        self.may_go = threading.Event()
        self.began = SimpleQueue[tuple[bytes, float]]()

    def begin(self, request_id: bytes, *, deadline_s: float, fetch: Fetch | None = None) -> ReceiveHandle:
        def held(left_s: float) -> int:
            self.began.put((request_id, left_s))
            return 32 * self.may_go.wait(10)

        handle = ReceiveHandle(request_id, limit_s=deadline_s)
        deadline_ns = self.clock.now_ns + int(deadline_s * SECOND_NS)
        self.fetches.begin(handle, fetch or held, lambda *what: self.told.append((request_id, *what)), deadline_ns=deadline_ns)
        return handle

    def pass_time(self, seconds: float) -> None:
        self.clock.now_ns += int(seconds * SECOND_NS)
        self.reactor.run_once(0)

    def until_told(self, count: int) -> None:
        while len(self.told) < count:
            self.reactor.run_once(10)


@contextmanager
def scene(*, share: float = 1.0) -> Iterator[Scene]:
    made = Scene(share)
    try:
        yield made
    finally:
        made.may_go.set()
        made.fetches.close()
        made.reactor.close()


def test_fetch_gets_the_rest_of_its_request_deadline() -> None:
    with scene() as on:
        on.begin(b"first", deadline_s=60)
        assert on.began.get(timeout=10) == (b"first", 60.0)
        on.begin(b"second", deadline_s=10)
        on.clock.now_ns += 7 * SECOND_NS
        on.may_go.set()
        on.until_told(2)
        assert on.began.get(timeout=10) == (b"second", 3.0)


def test_hanging_store_takes_only_a_share_of_requests_time() -> None:
    with scene(share=0.25) as on:
        on.begin(b"first", deadline_s=60)
        assert on.began.get(timeout=10) == (b"first", 15.0)
        on.begin(b"second", deadline_s=20)
        on.pass_time(4.9)
        assert on.told == []
        on.pass_time(0.1)
        assert on.told == [(b"second", 0, None, FENCED)], "the senders have it"
        on.pass_time(10)
        assert len(on.told) == 1, "the store may still write its blocks"
        on.may_go.set()
        on.until_told(2)
        assert on.told[1] == (b"first", 32, None, FENCED)
        assert on.began.empty()


@pytest.mark.parametrize("error", [ZeroDivisionError("a mistake"), SystemExit()])
def test_a_store_that_breaks_has_nothing_and_is_logged(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def broken(left_s: float) -> int:
        raise error

    with scene() as on, caplog.at_level(logging.ERROR):
        on.begin(b"r", deadline_s=60, fetch=broken)
        on.may_go.set()
        on.begin(b"next", deadline_s=60)
        on.until_told(2)
        assert on.told == [(b"r", 0, None, FENCED), (b"next", 32, None, FENCED)]
    assert "a store of prefixes failed" in caplog.text


def test_where_no_thread_is_to_be_had_the_store_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with scene() as on:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            on.begin(b"r", deadline_s=60)
            on.begin(b"cancelled", deadline_s=60)
        error = Cancelled("enough")
        assert on.fetches.fail(b"cancelled", error)
        on.may_go.set()
        on.until_told(2)
        assert on.told == [(b"r", 0, None, FENCED), (b"cancelled", 0, error, FENCED)]
        on.begin(b"next", deadline_s=60)
        on.until_told(3)
        assert on.told[2] == (b"next", 32, None, FENCED)
        assert on.began.qsize() == 1
