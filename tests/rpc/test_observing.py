"""Promises of observing.py: each request's time is told once, when its answer goes, whatever the order of the answers."""

from functools import partial

import pytest

from kvstore.protocol.errors import KVStoreError
from kvstore.rpc import observing
from kvstore.rpc.observing import Peer, Stopwatch


class Noted:
    slow_ns = 1 << 63

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.answered = {kind: partial(self._note, kind) for kind in range(256)}

    def _note(self, kind: int, elapsed_ns: int) -> None:
        assert elapsed_ns >= 0
        self.kinds.append(kind)

    def refused(self, error: KVStoreError) -> None:
        raise AssertionError

    def slow(self, peer: Peer, kind: int, elapsed_ns: int) -> None:
        raise AssertionError


def test_answers_in_order_and_out_of_order() -> None:
    noted = Noted()
    stopwatch = Stopwatch(noted)
    stopwatch.begin(1, 11)
    stopwatch.answered(1)
    for request in (2, 3, 4):
        stopwatch.begin(request, 10 + request)
    for request in (3, 4, 2):
        stopwatch.answered(request)
    assert noted.kinds == [11, 13, 14, 12]


def test_an_answer_is_told_once_and_a_request_without_an_id_never() -> None:
    noted = Noted()
    stopwatch = Stopwatch(noted)
    stopwatch.begin(1, 11)
    stopwatch.answered(1)
    stopwatch.answered(1)
    stopwatch.begin(0, 12)
    stopwatch.answered(0)
    assert noted.kinds == [11]


def test_of_one_peer_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "MAX_UNANSWERED", 2)
    noted = Noted()
    stopwatch = Stopwatch(noted)
    for request in range(1, 6):
        stopwatch.begin(request, request)
    for request in range(1, 6):
        stopwatch.answered(request)
    assert noted.kinds == [1, 2, 5]


def test_slow_request_is_told_with_its_type_and_duration() -> None:
    noted = Noted()
    stopwatch = Stopwatch(noted)
    stopwatch.begin(1, 11)
    assert stopwatch.answered(1) is None
    noted.slow_ns = 0
    stopwatch.begin(2, 12)
    slow = stopwatch.answered(2)
    assert slow is not None
    assert (slow[0], slow[1] >= 0) == (12, True)
    assert stopwatch.answered(2) is None
