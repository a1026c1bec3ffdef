"""Tests of logs.py."""

import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from kvstore.protocol.errors import Unavailable
from kvstore.protocol.shared_settings import FORMATS
from kvstore.telemetry.logs import EVENTS, JsonLines, TextLines, named, stops, write_logs

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"

log = logging.getLogger("kvstore.test_stopping")


def record(
    message: str = "node %s died", *, extra: dict[str, object] | None = None, error: BaseException | None = None
) -> logging.LogRecord:
    exc_info = (type(error), error, None) if error is not None else None
    made = logging.getLogger("kvstore.x").makeRecord("kvstore.x", logging.WARNING, "f", 1, message, ("a",), exc_info, extra=extra)
    made.created, made.msecs = 0.0, 7.0
    return made


def test_a_line_of_text_ends_with_the_events_name_and_fields() -> None:
    line = TextLines().format(record(extra=named("node_died", node="a b", node_id=1, why="")))
    assert line.endswith('kvstore.x WARNING node a died [node_died node="a b" node_id=1 why=""]')
    assert TextLines().format(record()).endswith("kvstore.x WARNING node a died")


def test_a_line_of_json_is_an_object() -> None:
    told = {"time": "1970-01-01T00:00:00.007Z", "level": "warning", "logger": "kvstore.x", "message": "node a died"}
    assert json.loads(JsonLines().format(record())) == {**told, "event": ""}
    line = JsonLines().format(record(extra=named("node_died", node="a", node_id=1, why=ValueError("no"))))
    assert json.loads(line) == {**told, "event": "node_died", "node": "a", "node_id": 1, "why": "no"}


def test_a_traceback_stays_within_the_line() -> None:
    line = JsonLines().format(record(error=ValueError("no")))
    assert "\n" not in line
    assert json.loads(line)["exception"] == "ValueError: no"


@pytest.fixture
def plain() -> Iterator[logging.StreamHandler[TextIO]]:
    """The root's plain handler, as `begin_logging` makes one."""
    handler: logging.StreamHandler[TextIO] = logging.StreamHandler(sys.stderr)
    logging.root.addHandler(handler)
    yield handler
    logging.root.removeHandler(handler)
    logging.getLogger("kvstore").setLevel(logging.NOTSET)


@pytest.mark.parametrize("form", FORMATS)
def test_plain_handlers_write_so_and_others_stay_as_they_are(plain: "logging.StreamHandler[TextIO]", form: str) -> None:
    others = [(handler, handler.formatter) for handler in logging.root.handlers if handler is not plain]
    write_logs("error", form)
    assert isinstance(plain.formatter, JsonLines if form == "json" else TextLines)
    assert [(handler, handler.formatter) for handler in logging.root.handlers if handler is not plain] == others
    assert not logging.getLogger("kvstore.store").isEnabledFor(logging.WARNING)


def test_an_event_has_its_name_and_fields() -> None:
    assert named("node_died", node="a", node_id=1) == {"event": "node_died", "fields": {"node": "a", "node_id": 1}}
    with pytest.raises(AssertionError):
        named("no such event")
    with pytest.raises(AssertionError, match="collides with one of every line"):
        named("log_level", of="kvstore", level="debug")


def test_operators_are_told_of_every_event() -> None:
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in EVENTS)
    listed = re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: text for name, text in listed if name in EVENTS} == EVENTS


def told(caplog: pytest.LogCaptureFixture) -> tuple[str, dict[str, str]]:
    [record] = caplog.records
    assert vars(record)["event"] == "daemon_stops"
    return record.getMessage(), vars(record)["fields"]


def test_the_signals_that_came_are_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, log.name)
    came: list[str] = []
    with stops(log, "router", came):
        came.append("SIGTERM")
    assert told(caplog) == ("this router stops: SIGTERM", {"why": "SIGTERM"})


@pytest.mark.parametrize(("error", "why"), [(Unavailable("no master"), "no master"), (MemoryError(), "MemoryError")])
def test_the_error_that_ends_it_is_why_and_is_raised_on(error: BaseException, why: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, log.name)
    with pytest.raises(type(error)), stops(log, "sidecar", ["SIGINT"]):
        raise error
    assert told(caplog) == (f"this sidecar stops: {why}", {"why": why})
