"""Promises of audit_trail.py, with a real reactor."""

import json
import logging
from collections.abc import Iterator, Sequence

import pytest

from kvstore.master.audit_trail import MAX_WAITING, WINDOW_NS, AuditTrail, Change
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Denied, InvalidArgument
from kvstore.rpc.reactor import Reactor
from kvstore.security.actor import Actor
from kvstore.telemetry.logs import JsonLines

ALICE = Actor("operator", "alice", peer="10.0.0.7", via="control")
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
