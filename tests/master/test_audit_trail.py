"""Tests of audit_trail.py, with a real reactor."""

import json
import logging
from collections.abc import Iterator, Sequence

import pytest

from kvstore.master.audit_trail import MAX_KEYS, MAX_WAITING, WINDOW_NS, AuditTrail, Change, RepeatFilter, entry_of
from kvstore.master.directory.audit_log import MAX_TEXT_BYTES
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Denied, InvalidArgument
from kvstore.rpc.reactor import Reactor
from kvstore.security.actor import Actor
from kvstore.telemetry.logs import JsonLines

ALICE = Actor("operator", "alice", peer="10.0.0.7", via="control")
BY = Actor("operator", "alice", "0123456789abcdef", "10.0.0.7", "console")
DRAIN = Change(ALICE, "drain", "node n1", "takes blocks", "drained to peers")


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    made = Reactor()
    yield made
    made.close()


class Owner:
    """Of the catalog, while it `is_there`."""

    def __init__(self) -> None:
        self.is_there = True
        self.entries: list[pb.AuditEntry] = []

    def deliver(self, entries: Sequence[pb.AuditEntry]) -> bool:
        self.entries += entries if self.is_there else []
        return self.is_there


def trail_of(reactor: Reactor, owner: Owner) -> AuditTrail:
    trail = AuditTrail(reactor, wall_s=lambda: 7.0)
    trail.master, trail.deliver = "m1", owner.deliver
    return trail


def test_change_is_logged_counted_and_delivered(reactor: Reactor, caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    trail = trail_of(reactor, owner)
    with caplog.at_level(logging.INFO, "kvstore.audit"):
        trail.done(DRAIN)
    trail.failed(DRAIN, InvalidArgument("there is no node n1"))
    trail.failed(DRAIN, Denied("not yours"))
    assert [(entry.result, entry.detail) for entry in owner.entries] == [
        ("done", ""),
        ("failed", "there is no node n1"),
        ("refused", "not yours"),
    ]
    assert trail.counts() == {("drain", "done"): 1, ("drain", "failed"): 1, ("drain", "refused"): 1}
    line = json.loads(JsonLines().format(caplog.records[0]))
    assert line["message"] == "operator alice (10.0.0.7): drain node n1: takes blocks -> drained to peers"
    assert (line["event"], line["actor"], line["peer"], line["new"]) == ("audit", "alice", "10.0.0.7", "drained to peers")


def test_entries_wait_for_an_owner(reactor: Reactor) -> None:
    owner = Owner()
    trail, owner.is_there = trail_of(reactor, owner), False
    trail.done(DRAIN)
    taken = trail.take_waiting()
    assert trail.take_waiting() == []
    trail.done(Change(ALICE, "forget"))
    trail.put_back(taken)
    trail.run_due(0)
    owner.is_there = True
    trail.run_due(0)
    trail.run_due(0)
    assert [entry.action for entry in owner.entries] == ["drain", "forget"]


def test_waiting_entries_are_bounded(reactor: Reactor) -> None:
    owner = Owner()
    trail, owner.is_there = trail_of(reactor, owner), False
    for number in range(MAX_WAITING + 5):
        trail.done(Change(ALICE, f"a{number}"))
    trail.put_back([pb.AuditEntry(action="older")])
    waiting = trail.take_waiting()
    assert (len(waiting), waiting[0].action) == (MAX_WAITING, "a5")


@pytest.mark.promise("authentication")
def test_repeats_are_merged(reactor: Reactor) -> None:
    owner = Owner()
    trail = trail_of(reactor, owner)
    for _ in range(1000):
        trail.denied(Actor("unauthenticated", peer="10.0.0.9"), Denied("wrong token"))
        trail.repeated(Change(ALICE, "remove"), "5 blocks")
    reactor.run_once(0)
    trail.run_due(reactor.now_ns() + WINDOW_NS)
    told = sorted((entry.action, entry.result, entry.detail, entry.count) for entry in owner.entries)
    assert told == [
        ("login", "refused", "", 999),
        ("login", "refused", "wrong token", 1),
        ("remove", "done", "", 999),
        ("remove", "done", "5 blocks", 1),
    ]
    assert trail.counts() == {("login", "refused"): 1000, ("remove", "done"): 1000}


def test_entry_has_all_of_a_change() -> None:
    entry = entry_of(Change(BY, "drain", "node n1", "takes blocks", "drained to nvme"), "done", master="m1", time_s=5.0)
    assert (entry.kind, entry.actor, entry.credential, entry.peer, entry.via) == tuple(BY.to_dict().values())
    assert (entry.action, entry.target, entry.old, entry.new) == ("drain", "node n1", "takes blocks", "drained to nvme")
    assert (entry.result, entry.master, entry.time_s, entry.number, entry.count) == ("done", "m1", 5.0, 0, 0)


def test_entry_is_bounded_whatever_an_actor_is_called() -> None:
    entry = entry_of(Change(Actor("unauthenticated", "x" * 9999), "login", detail="y" * 9999), "refused", master="m1", time_s=5.0, count=3)
    assert len(entry.actor) == len(entry.detail) == MAX_TEXT_BYTES
    assert entry.count == 3


def test_first_is_reported_at_once_and_repeats_after_a_window() -> None:
    repeats = RepeatFilter[str]()
    assert [repeats.is_first("a", now_ns) for now_ns in (0, 1, 2)] == [True, False, False]
    assert repeats.is_first("b", 5)
    assert list(repeats.due(WINDOW_NS - 1)) == []
    assert list(repeats.due(WINDOW_NS)) == [("a", 2)]
    assert list(repeats.due(2 * WINDOW_NS)) == [], "b was not repeated"
    assert repeats.is_first("a", 2 * WINDOW_NS)


def test_too_many_different_ones_are_counted_together() -> None:
    """The last of them stands for all."""
    repeats = RepeatFilter[int]()
    assert sum(repeats.is_first(number, 0) for number in range(MAX_KEYS + 10)) == MAX_KEYS
    assert list(repeats.due(WINDOW_NS)) == [(MAX_KEYS + 9, 10)]
    assert repeats.is_first(0, WINDOW_NS)
