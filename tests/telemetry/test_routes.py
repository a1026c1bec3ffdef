"""Tests of routes.py and signals.py."""

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvstore.protocol.errors import DeadlineExceeded
from kvstore.telemetry import routes
from kvstore.telemetry.http.access import AccessLevel
from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.logs import JsonLines
from kvstore.telemetry.metrics.metric import Metric, MetricKind
from kvstore.telemetry.routes import LevelChange, add_debug, add_health, add_log_level, add_metrics
from tests.telemetry.http.asking import Answer, ask
from tests.telemetry.http.served import FixedAccess, running

BLOCKS = Metric("kvstore_x_blocks", MetricKind.GAUGE, "Blocks.")

LOGGER = logging.getLogger("kvstore.of_this_test")


@contextlib.contextmanager
def serving(*adders: Callable[[HttpServer], None], access: AccessLevel = AccessLevel.ADMIN) -> Iterator[HttpServer]:
    server = HttpServer("127.0.0.1:0", access_control=FixedAccess(access))
    for add in adders:
        add(server)
    with running(server):
        yield server


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    yield
    for logger in (LOGGER, logging.getLogger("kvstore")):
        logger.setLevel(logging.NOTSET)


@contextlib.contextmanager
def health(unready: Callable[[], Sequence[str]], alive: Callable[[], None] = lambda: None) -> Iterator[str]:
    with serving(lambda server: add_health(server, alive, unready), access=AccessLevel.NONE) as server:
        yield server.address


def hang() -> None:
    raise DeadlineExceeded("the event loop did not answer within 5 s")


def test_a_daemon_that_lives_and_serves_says_ok() -> None:
    with health(list) as address:
        for path in ("/healthz", "/readyz"):
            answer = ask(address, path)
            assert (answer.status, answer.text) == (200, "ok\n")


def test_one_that_does_not_serve_says_why_and_lives() -> None:
    with health(lambda: ["no master", "no disk"]) as address:
        assert ask(address, "/healthz").status == 200
        answer = ask(address, "/readyz")
        assert (answer.status, answer.text) == (503, "no master\nno disk\n")


def test_one_whose_loop_hangs_is_neither() -> None:
    def unready() -> Sequence[str]:
        hang()
        return []

    with health(unready, hang) as address:
        for path in ("/healthz", "/readyz"):
            answer = ask(address, path)
            assert (answer.status, answer.text) == (503, "the event loop did not answer within 5 s\n")


@pytest.mark.parametrize("has", AccessLevel)
def test_who_may_read_gets_them(has: AccessLevel) -> None:
    with serving(lambda server: add_metrics(server, (BLOCKS,), lambda: {"kvstore_x_blocks": 7}), access=has) as server:
        answer = ask(server.address, "/metrics", headers={"Accept": "application/openmetrics-text"})
    if has is AccessLevel.NONE:
        assert answer.status == 401
    else:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert "kvstore_x_blocks 7.0\n" in answer.text


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with serving(add_log_level) as server:
        yield server


def post(server: HttpServer, body: object) -> Answer:
    return ask(server.address, "/debug/log-level", method="POST", body=json.dumps(body).encode())


def test_log_level_changes_and_is_logged(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    assert post(server, {"level": "debug", "of": LOGGER.name}).json()[LOGGER.name] == "debug"
    assert LOGGER.isEnabledFor(logging.DEBUG)
    line = json.loads(JsonLines().format(caplog.records[-1]))
    assert (line["event"], line["level"], line["of"], line["to"]) == ("log_level", "warning", LOGGER.name, "debug")
    assert line["by"] == "anonymous from 127.0.0.1"
    assert post(server, {"level": "error"}).status == 200
    assert ask(server.address, "/debug/log-level").json()[LOGGER.name] == "debug", "it has a level of its own"
    assert logging.getLogger("kvstore").level == logging.ERROR


def test_change_of_a_level_is_reported() -> None:
    changes: list[LevelChange] = []
    with serving(lambda server: add_log_level(server, changes.append)) as server:
        for level in ("debug", "info"):
            assert post(server, {"level": level, "of": LOGGER.name}).status == 200
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


def test_levels_threads_and_profiles_are_for_operators() -> None:
    with serving(add_log_level, add_debug, access=AccessLevel.READ) as server:
        assert post(server, {"level": "debug"}).status == 401
        assert [ask(server.address, path).status for path in ("/debug/threads", "/debug/profile")] == [401, 401]


@pytest.fixture
def debugged() -> Iterator[HttpServer]:
    with serving(add_debug) as server:
        yield server


def test_threads_and_profiles_are_texts(debugged: HttpServer) -> None:
    assert "MainThread (" in ask(debugged.address, "/debug/threads").text
    assert "MainThread;" in ask(debugged.address, "/debug/profile?seconds=0.05").text


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "61", "much"])
def test_seconds_out_of_bounds_are_refused(debugged: HttpServer, seconds: str) -> None:
    answer = ask(debugged.address, f"/debug/profile?seconds={seconds}")
    assert (answer.status, "above 0 and up to 60" in answer.text) == (400, True)


def test_a_second_profile_is_refused_while_one_is_taken(debugged: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, end = threading.Event(), threading.Event()

    def slowly(_seconds: float) -> str:
        entered.set()
        end.wait(60)
        return "done"

    monkeypatch.setattr(routes, "profile", slowly)
    answers: list[Answer] = []
    asking = threading.Thread(target=lambda: answers.append(ask(debugged.address, "/debug/profile")))
    asking.start()
    try:
        assert entered.wait(60)
        assert ask(debugged.address, "/debug/profile").status == 503
        end.set()
        asking.join(60)
        assert [answer.text for answer in answers] == ["done"]
        assert ask(debugged.address, "/debug/profile").status == 200
    finally:
        end.set()
