"""Promises of watch.py: on a clock of its own, but for the thread."""

import json
import threading
from collections.abc import Sequence

import pytest

from kvstore.console.config import ConsoleSettings
from kvstore.console.source import ClusterSnapshot
from kvstore.console.watch import MAX_AUDITED, WATCHED_S, ClusterWatcher
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Denied, Unavailable
from tests.console.serving import Clock
from tests.console.simulated import Simulated

WAIT_S = 60.0


def watch_of(source: Simulated, clock: Clock) -> ClusterWatcher:
    return ClusterWatcher(source, ConsoleSettings(interval_s=1), clock=clock, wall=clock)


def texts(watch: ClusterWatcher) -> list[str]:
    return [event["text"] for event in watch.events(0)]


def test_looks_make_a_state_a_history_and_events() -> None:
    clock = Clock()
    source = Simulated(3, clock)
    watch = watch_of(source, clock)
    assert json.loads(watch.state()) == {"version": 0, "interval_s": 1, "failure": "", "banner": None, "time_s": clock(), "cluster": None}
    for _ in range(4):
        watch.poll()
        clock.now_s += 1
    state = json.loads(watch.state())
    assert (state["version"], state["cluster"]["totals"]["nodes"]) == (4, 3)
    assert len(watch.history("", 100)["series"]["hits_per_s"]) == 3, "the first look knows no rates"
    assert watch.history("node-1", 100)["series"]["hits_per_s"][0] > 0
    source.dead = {1}
    watch.poll()
    assert texts(watch)[2:] == ["node-1 is dead"]


def test_watcher_keeps_last_state_while_source_fails() -> None:
    clock = Clock()
    source = Simulated(1, clock)
    watch = watch_of(source, clock)
    watch.poll()
    source.failure = Unavailable("nobody is there")
    for _ in range(3):
        watch.poll()
    state = json.loads(watch.state())
    assert (state["failure"], state["cluster"]["totals"]["nodes"]) == ("nobody is there", 1)
    source.failure = None
    watch.poll()
    assert json.loads(watch.state())["failure"] == ""
    assert texts(watch)[2:] == ["The cluster does not answer: nobody is there", "The cluster answers again"]


def test_who_listens_is_told_of_each_look_until_he_stops() -> None:
    clock = Clock()
    watch, told = watch_of(Simulated(1, clock), clock), list[int]()
    stop = watch.listen(lambda: told.append(1))
    watch.poll()
    stop()
    watch.poll()
    assert told == [1]


def test_its_thread_looks_again_and_again_whatever_a_look_raises() -> None:
    looks = threading.Semaphore(0)

    class Odd(Simulated):
        def snapshot(self) -> ClusterSnapshot:
            looks.release()
            raise RuntimeError("a bug")

    watch = ClusterWatcher(Odd(1, lambda: 0.0), ConsoleSettings(interval_s=0.001))
    watch.start()
    try:
        for _ in range(3):
            assert looks.acquire(timeout=WAIT_S)
    finally:
        watch.close()
    watch.close()


class Counted(Simulated):
    """Whose looks are waited for."""

    def __init__(self) -> None:
        super().__init__(1, lambda: 0.0)
        self.looks = threading.Semaphore(0)

    def snapshot(self) -> ClusterSnapshot:
        self.looks.release()
        return super().snapshot()


def test_watcher_pauses_unwatched_and_polls_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.console.watch.MAX_SHARE", 1.0)  # else it waits for twenty times what its looks have taken
    clock, source, rests = Clock(), Counted(), threading.Semaphore(0)

    def rest_s() -> float:
        rests.release()
        return 24 * 3600.0

    watch = ClusterWatcher(source, ConsoleSettings(interval_s=0.001), clock=clock, rest_s=rest_s)
    watch.start()
    try:
        assert source.looks.acquire(timeout=WAIT_S)
        assert rests.acquire(timeout=WAIT_S)
        assert not source.looks.acquire(blocking=False), "one look, and it rests"
        assert watch.state()
        assert source.looks.acquire(timeout=WAIT_S), "who reads the state has it looked at"
        stop = watch.listen(lambda: None)
        for _ in range(3):
            clock.now_s += WATCHED_S
            assert source.looks.acquire(timeout=WAIT_S), "again and again while somebody listens"
        stop()
    finally:
        watch.close()


def test_what_a_source_could_not_be_told_is_a_trouble() -> None:
    clock = Clock()
    source = Simulated(1, clock)
    source.missing = ("m2 at m2:1 does not answer",)
    watch = watch_of(source, clock)
    watch.poll()
    trouble = json.loads(watch.state())["cluster"]["problems"][0]
    assert (trouble["level"], trouble["text"]) == ("error", "m2 at m2:1 does not answer")


def test_watcher_unreachable_cluster_has_banner_since_when() -> None:
    clock = Clock()
    source = Simulated(1, clock)
    watch = watch_of(source, clock)
    watch.poll()
    banners = []
    for failure in (None, Unavailable("no master answers"), Unavailable("still none"), None, Unavailable("again")):
        clock.now_s += 10
        source.failure = failure
        watch.poll()
        banners.append(json.loads(watch.state())["banner"])
    assert [banners[0], banners[3]] == [None, None]
    first, second, later = banners[1], banners[2], banners[4]
    assert (first["text"], second["text"]) == ("The cluster does not answer: no master answers", "The cluster does not answer: still none")
    assert (first["since_s"], first["is_older"]) == (second["since_s"], second["is_older"])
    assert (later["since_s"] - first["since_s"], later["is_older"]) == (30, False)


def test_audit_entries_become_events_once() -> None:
    """Those of before the first look come first, at their own time, the newest MAX_AUDITED of them."""
    clock = Clock()
    source = Simulated(1, clock)
    source.entries = [
        pb.AuditEntry(number=number, time_s=number, kind="operator", action="drain", result="done") for number in range(1, MAX_AUDITED + 3)
    ]
    watch = watch_of(source, clock)
    clock.now_s = 1e6
    watch.poll()
    assert [event["time_s"] for event in watch.events(0)][:3] == [3.0, 4.0, 5.0]
    assert len([text for text in texts(watch) if text == "operator: drain"]) == MAX_AUDITED
    before = len(texts(watch))
    watch.poll()
    assert len(texts(watch)) == before
    source.entries.append(pb.AuditEntry(number=len(source.entries) + 1, kind="operator", action="forget", target="node n1", result="done"))
    watch.poll()
    assert texts(watch)[before:] == ["operator: forget node n1"]


def test_source_that_refuses_the_audit_trail_is_not_asked_again() -> None:
    asked = []

    class Closed(Simulated):
        def audit(self, after: int) -> Sequence[pb.AuditEntry]:
            asked.append(after)
            raise Denied("for operators")

    clock = Clock()
    watch = watch_of(Closed(1, clock), clock)
    watch.poll()
    watch.poll()
    assert asked == [0]
    assert json.loads(watch.state())["failure"] == ""
