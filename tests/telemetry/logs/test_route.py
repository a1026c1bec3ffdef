"""Promises of route.py: levels change at run time, for operators."""

import json
import logging
from collections.abc import Iterator

import pytest

from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.logs.route import LevelChange, add_log_level
from kvstore.telemetry.logs.writing import JsonLines
from tests.telemetry.http.asking import Answer, ask

LOGGER = logging.getLogger("kvstore.of_this_test")


@pytest.fixture
def server() -> Iterator[HttpServer]:
    server = HttpServer("127.0.0.1:0")
    add_log_level(server)
    server.start()
    yield server
    server.close()
    for logger in (LOGGER, logging.getLogger("kvstore")):
        logger.setLevel(logging.NOTSET)


def post(server: HttpServer, body: object) -> Answer:
    return ask(server.address, "/debug/log-level", method="POST", body=json.dumps(body).encode())


def test_a_loggers_level_changes_and_is_told(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    assert post(server, {"level": "debug", "of": LOGGER.name}).json()[LOGGER.name] == "debug"
    assert LOGGER.isEnabledFor(logging.DEBUG)
    line = json.loads(JsonLines().format(caplog.records[-1]))
    assert (line["event"], line["level"], line["of"], line["to"]) == ("log_level", "warning", LOGGER.name, "debug")
    assert line["by"] == "anybody from 127.0.0.1"
    assert post(server, {"level": "error"}).status == 200
    assert ask(server.address, "/debug/log-level").json()[LOGGER.name] == "debug", "it has a level of its own"
    assert logging.getLogger("kvstore").level == logging.ERROR


def test_change_of_a_level_is_reported() -> None:
    server, changes = HttpServer("127.0.0.1:0"), list[LevelChange]()
    add_log_level(server, changes.append)
    server.start()
    try:
        for level in ("debug", "info"):
            assert post(server, {"level": level, "of": LOGGER.name}).status == 200
    finally:
        server.close()
        LOGGER.setLevel(logging.NOTSET)
    assert [(change.of, change.new, change.by.peer) for change in changes] == [
        (LOGGER.name, "debug", "127.0.0.1"),
        (LOGGER.name, "info", "127.0.0.1"),
    ]
    assert changes[1].old == "debug"


@pytest.mark.parametrize(
    "body", ["no", [], {}, {"level": "loud"}, {"level": "debug", "of": "aiohttp"}, {"level": "debug", "of": "kvstore.none"}]
)
def test_what_cannot_be_is_refused(server: HttpServer, body: object) -> None:
    assert post(server, body).status == 400


def test_it_is_for_operators() -> None:
    server = HttpServer("127.0.0.1:0", authorize=lambda _: Access.READ)
    add_log_level(server)
    server.start()
    try:
        assert post(server, {"level": "debug"}).status == 401
    finally:
        server.close()
