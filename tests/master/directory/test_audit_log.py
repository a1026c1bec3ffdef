"""Tests of audit_log.py."""

import pytest

from kvstore.master.directory import audit_log
from kvstore.master.directory.audit_log import AuditLog, clip, is_audit
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Corrupt


def numbers(log: AuditLog, after: int = 0) -> list[int]:
    return [entry.number for entry in log.after(after)]


def test_entries_survive_as_records() -> None:
    """A log that takes the operations of another one has the same entries and goes on with its numbers."""
    log, copy = AuditLog(), AuditLog()
    for action, count in (("drain", 0), ("login", 1), ("forget", 0)):
        for op in log.add(pb.AuditEntry(action=action, count=count)):
            assert is_audit(op.key)
            copy.take(op.key, op.value)
    assert copy.after(0) == log.after(0)
    assert [entry.action for entry in log.after(0)] == ["drain", "login", "forget"]
    assert numbers(log, after=2) == [3]
    assert numbers(log, after=3) == []
    copy.add(pb.AuditEntry(action="drain"))
    assert copy.last == 4


@pytest.mark.promise("audit-trail")
def test_flood_of_refusals_evicts_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "_LIMITS", {audit_log.CHANGES: 2, audit_log.OTHERS: 3})
    log, copy = AuditLog(), AuditLog()
    for entry in [pb.AuditEntry(action="drain")] * 3 + [pb.AuditEntry(action="login", count=1)] * 9:
        for op in log.add(pb.AuditEntry(action=entry.action, count=entry.count)):
            copy.take(op.key, op.value)
    assert numbers(log) == numbers(copy) == [2, 3, 10, 11, 12]


@pytest.mark.parametrize(("key", "value"), [(b"ac", b""), (b"ax" + bytes(8), b""), (b"ac" + bytes(8), b"\xff")])
def test_damaged_record_is_refused(key: bytes, value: bytes) -> None:
    with pytest.raises(Corrupt, match="is damaged"):
        AuditLog().take(key, value)


def test_texts_are_clipped_and_printable() -> None:
    assert clip("red") == "red"
    assert clip("a\nb\x1b[0m") == "a\ufffdb\ufffd[0m"
    assert len(clip("\u00e4" * 1000).encode()) <= audit_log.MAX_TEXT_BYTES
    assert clip("\udcff") == "\ufffd"
