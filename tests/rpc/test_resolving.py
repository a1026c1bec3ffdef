"""Promises of resolving.py, with a loop in a thread."""

import socket
import threading
from queue import SimpleQueue
from typing import Any

import pytest

from kvstore.rpc.address import Address
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.resolving import Found, resolve
from tests.rpc.unanswering import has_addresses

Answers = SimpleQueue[Found | OSError]


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def reactor() -> Any:
    reactor = Reactor()
    yield reactor
    reactor.close()


def serve(reactor: Reactor, answers: Answers) -> Found | OSError:
    """The next answer, which comes in the loop."""
    while answers.empty():
        reactor.run_once(10)
    return answers.get()


@pytest.mark.parametrize(
    ("host", "family", "name"), [("127.0.0.1", socket.AF_INET, ("127.0.0.1", 7)), ("::1", socket.AF_INET6, ("::1", 7, 0, 0))]
)
def test_an_ip_address_is_found_at_once(reactor: Reactor, answers: Answers, host: str, family: int, name: tuple[Any, ...]) -> None:
    resolve(reactor, Address(host, 7), answers.put)
    assert answers.get_nowait() == [(family, name)]


def test_a_names_addresses_come_in_the_loop(reactor: Reactor, answers: Answers) -> None:
    threads: list[threading.Thread] = []

    def on_found(found: Found | OSError) -> None:
        threads.append(threading.current_thread())
        answers.put(found)

    resolve(reactor, Address("localhost", 7), on_found)
    found = serve(reactor, answers)
    assert isinstance(found, list)
    assert found[0][1][:2] in [("127.0.0.1", 7), ("::1", 7)]
    assert threads == [threading.current_thread()]


def test_a_name_of_nobody_and_one_that_is_none_are_os_errors(reactor: Reactor, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(reactor, Address("a" * 64, 7), answers.put)
    assert "not a host name" in str(serve(reactor, answers))

    def fails(*args: Any, **keywords: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "nobody")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    resolve(reactor, Address("nobody", 7), answers.put)
    assert isinstance(serve(reactor, answers), socket.gaierror)


def test_the_preferred_address_comes_first(reactor: Reactor, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    has_addresses(monkeypatch, ("127.0.0.2", 1), ("127.0.0.3", 1))
    resolve(reactor, Address("host", 1), answers.put)
    assert answers.get_nowait() == [(socket.AF_INET, ("127.0.0.2", 1)), (socket.AF_INET, ("127.0.0.3", 1))]
