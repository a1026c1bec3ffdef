"""Promises of control_crew.py, with its threads; the clock is the test's."""

import threading

import pytest

from kvstore.master.control_crew import Crew
from kvstore.master.control_lines import Line
from kvstore.security.identity import Kind
from tests.no_threads import no_more_threads

RED, NODES = Line(Kind.TENANT, "red"), Line(Kind.NODE)
TIMEOUT_S = 30.0


class Call:
    """As far as a crew knows one: it is served until it is cancelled or told to go on."""

    def __init__(self, crew: Crew, patience_s: float = 5.0) -> None:
        self._crew, self._patience_s = crew, patience_s
        self._may_end = threading.Event()
        self.began, self.ended = threading.Event(), threading.Event()
        self.is_cancelled = False

    def __call__(self) -> None:
        with self._crew.waiting_for(self, self._patience_s):
            self.began.set()
            assert self._may_end.wait(TIMEOUT_S)
        self.ended.set()

    def cancel(self) -> None:
        self.is_cancelled = True
        self._may_end.set()

    def go_on(self) -> None:
        self._may_end.set()
        assert self.ended.wait(TIMEOUT_S)


def test_calls_are_served_when_there_is_a_place_and_one_that_fails_gives_its_own_back(caplog: pytest.LogCaptureFixture) -> None:
    crew, over = Crew(4), threading.Event()

    def fail() -> None:
        raise ValueError("a fault")

    calls = [Call(crew) for _ in range(3)]
    try:
        crew.serve(RED, fail)
        for call in calls:
            crew.serve(RED, call)
        assert calls[0].began.wait(TIMEOUT_S)
        assert calls[1].began.wait(TIMEOUT_S)
        crew.serve(NODES, over.set)
        assert over.wait(TIMEOUT_S)
        assert not calls[2].began.is_set(), "half of the places is all that one caller has"
        calls[0].go_on()
        assert calls[2].began.wait(TIMEOUT_S)
    finally:
        for call in calls:
            call.cancel()
        crew.close()
    assert "a control call failed" in caplog.text


def test_whose_peer_is_waited_for_in_vain_is_cancelled_and_nobody_else() -> None:
    now_s = 0.0
    crew = Crew(8, clock_s=lambda: now_s)
    calls = [Call(crew, patience_s) for patience_s in (5.0, 6.0)]
    try:
        for call in calls:
            crew.serve(NODES, call)
            assert call.began.wait(TIMEOUT_S)
        now_s = 4.9
        assert crew.expire() == 0
        now_s = 5.0
        assert crew.expire() == 1
        assert [call.is_cancelled for call in calls] == [True, False]
        calls[1].go_on()
        now_s = 99.0
        assert calls[0].ended.wait(TIMEOUT_S)
        assert crew.expire() == 0
    finally:
        for call in calls:
            call.cancel()
        crew.close()


def test_calls_are_served_where_the_system_has_no_thread_left_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew(4)
    calls = [Call(crew) for _ in range(2)]
    no_more_threads(monkeypatch)
    try:
        for call in calls:
            crew.serve(RED, call)
        for call in calls:
            assert call.began.wait(TIMEOUT_S)
            call.go_on()
    finally:
        crew.close()


def test_once_closed_it_begins_nothing() -> None:
    crew, call, later = Crew(1), Call(Crew(1)), threading.Event()
    crew.serve(RED, call)
    assert call.began.wait(TIMEOUT_S)
    crew.serve(RED, later.set)
    crew.close()
    crew.serve(RED, later.set)
    call.go_on()
    crew._threads.shutdown(wait=True)
    assert not later.is_set()
