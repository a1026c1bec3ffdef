"""Promises of writing.py."""

import json
import logging
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest

from kvstore.telemetry.logs.events import named
from kvstore.telemetry.logs.writing import FORMATS, JsonLines, TextLines, write_logs


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
