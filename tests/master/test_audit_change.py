"""Promises of change.py."""

from kvstore.master.audit_trail import Change, entry_of
from kvstore.master.directory.audit_log import MAX_TEXT_BYTES
from kvstore.security.actor import Actor

ALICE = Actor("operator", "alice", "0123456789abcdef", "10.0.0.7", "console")


def test_entry_has_all_of_a_change() -> None:
    entry = entry_of(Change(ALICE, "drain", "node n1", "takes blocks", "drained to nvme"), "done", master="m1", time_s=5.0)
    assert (entry.kind, entry.actor, entry.credential, entry.peer, entry.via) == tuple(ALICE.told().values())
    assert (entry.action, entry.target, entry.old, entry.new) == ("drain", "node n1", "takes blocks", "drained to nvme")
    assert (entry.result, entry.master, entry.time_s, entry.number, entry.count) == ("done", "m1", 5.0, 0, 0)


def test_entry_is_bounded_whatever_an_actor_is_called() -> None:
    entry = entry_of(Change(Actor("unauthenticated", "x" * 9999), "login", detail="y" * 9999), "refused", master="m1", time_s=5.0, count=3)
    assert len(entry.actor) == len(entry.detail) == MAX_TEXT_BYTES
    assert entry.count == 3
