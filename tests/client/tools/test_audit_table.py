"""Promises of audit_table.py."""

from rich.console import Console

from kvstore.client.tools.audit_table import audit_table, matching
from kvstore.protocol import control_pb2 as pb

ALICE = pb.AuditEntry(number=1, time_s=1_700_000_000, kind="operator", actor="alice", peer="10.0.0.7", via="control", result="done")
ALICE.MergeFrom(pb.AuditEntry(action="quota_set", target="tenant red", old="pins 1", new="pins 2"))
GUESS = pb.AuditEntry(number=2, time_s=1_700_000_100, kind="unauthenticated", peer="10.0.0.9", via="http", action="login", result="refused")
GUESS.MergeFrom(pb.AuditEntry(detail="wrong token", count=17))


def found(since_s: float | None = None, by: str | None = None, action: str | None = None, result: str | None = None) -> list[pb.AuditEntry]:
    return matching([ALICE, GUESS], since_s=since_s, by=by, action=action, result=result)


def test_filters_select_entries() -> None:
    assert found() == [ALICE, GUESS]
    assert found(since_s=1_700_000_050.0) == found(by="10.0.0.9") == found(result="refused") == [GUESS]
    assert found(by="alice") == found(by="operator") == found(action="quota_set") == [ALICE]


def test_table_has_who_what_and_the_result() -> None:
    console = Console(width=200, force_terminal=False)
    with console.capture() as printed:
        console.print(audit_table([ALICE, GUESS]))
        console.print(audit_table([]))
    text = printed.get()
    assert "2023-11-14 22:13:20" in text
    assert all(word in text for word in ("operator alice", "10.0.0.7", "quota_set", "tenant red", "pins 1", "pins 2", "done"))
    assert "refused, 17 times: wrong token" in text
    assert "The audit trail has no such entry." in text
