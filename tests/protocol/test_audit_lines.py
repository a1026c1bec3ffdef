"""Promises of audit_lines.py."""

import pytest

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.audit_lines import line_of


def of_alice(**about: str) -> pb.AuditEntry:
    entry = pb.AuditEntry(kind="operator", actor="alice", peer="10.0.0.7", result="done")
    for name, text in about.items():
        setattr(entry, name, text)
    return entry


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (
            of_alice(action="quota_set", target="tenant red", old="pins 1", new="pins 2"),
            "operator alice (10.0.0.7): quota set tenant red: pins 1 -> pins 2",
        ),
        (pb.AuditEntry(kind="master", action="x", new="2", result="done"), "master: x: - -> 2"),
        (pb.AuditEntry(kind="master", action="x", old="2", result="done"), "master: x: 2 -> -"),
        (
            pb.AuditEntry(kind="unauthenticated", peer="10.0.0.9", action="login", result="refused", detail="wrong token", count=1700),
            "unauthenticated (10.0.0.9): login, refused (1,700 times): wrong token",
        ),
    ],
)
def test_entry_is_a_sentence(entry: pb.AuditEntry, line: str) -> None:
    assert line_of(entry) == line
