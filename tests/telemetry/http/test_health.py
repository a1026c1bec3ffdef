"""Promises of health.py: one line a reason, without a credential."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from kvstore.protocol.errors import DeadlineExceeded
from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.health import add_health
from kvstore.telemetry.http.server import HttpServer
from tests.telemetry.http.asking import ask


@contextlib.contextmanager
def health(unready: Callable[[], Sequence[str]], alive: Callable[[], None] = lambda: None) -> Iterator[str]:
    server = HttpServer("127.0.0.1:0", authorize=lambda _: Access.NONE)
    add_health(server, alive, unready)
    server.start()
    try:
        yield server.address
    finally:
        server.close()


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
