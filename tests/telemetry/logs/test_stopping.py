"""Promises of stopping.py: one event says why a daemon stops, however it does."""

import logging

import pytest

from kvstore.protocol.errors import Unavailable
from kvstore.telemetry.logs.stopping import stops

log = logging.getLogger("kvstore.test_stopping")


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
