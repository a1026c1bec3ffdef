"""Promises of events.py: names are stable words, and docs/operations.md lists them all."""

import re
from pathlib import Path

import pytest

from kvstore.telemetry.logs.events import EVENTS, named

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


def test_an_event_has_its_name_and_fields() -> None:
    assert named("node_died", node="a", node_id=1) == {"event": "node_died", "fields": {"node": "a", "node_id": 1}}
    with pytest.raises(AssertionError):
        named("no such event")
    with pytest.raises(AssertionError, match="take the place of what each line has"):
        named("log_level", of="kvstore", level="debug")


def test_operators_are_told_of_every_event() -> None:
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in EVENTS)
    listed = re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: text for name, text in listed if name in EVENTS} == EVENTS
