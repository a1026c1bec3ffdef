"""Promises of questions.py: each question is answered once, whatever becomes of it."""

import logging

import pytest

from kvstore.protocol.errors import DeadlineExceeded, Denied, KVStoreError, ProtocolError, Unavailable
from kvstore.protocol.frames import Header, pack_header, unpack_header
from kvstore.protocol.session_messages import Failure
from kvstore.rpc.questions import Questions
from kvstore.rpc.reactor import Reactor

KIND = 77


def header(number: int) -> Header:
    return unpack_header(pack_header(KIND, number, 0, 0, 0))


class Asking:
    """Questions of a reactor, and what was answered."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.questions = Questions(self.reactor)
        self.answers: list[tuple[int | None, bytes | str]] = []

    def ask(self, deadline_s: float = 600.0) -> int:
        return self.questions.ask(self._take, deadline_s)

    def _take(self, header: Header | None, answer: memoryview | KVStoreError) -> None:
        if header is None:
            assert isinstance(answer, KVStoreError)
            self.answers.append((None, type(answer).__name__))
        else:
            assert isinstance(answer, memoryview)
            self.answers.append((header.request_id, bytes(answer)))


@pytest.fixture
def asking() -> Asking:
    return Asking()


def test_an_answer_is_for_who_asked_and_comes_once(asking: Asking) -> None:
    one, two = asking.ask(), asking.ask()
    assert asking.questions.answered(header(two), memoryview(b"it"), None)
    assert not asking.questions.answered(header(two), memoryview(b"again"), None)
    assert asking.questions.answered(header(one), memoryview(b""), Failure(Denied.code, "no"))
    assert asking.answers == [(two, b"it"), (None, "Denied")]


def test_without_an_answer_its_time_ends_it(asking: Asking) -> None:
    number = asking.ask(deadline_s=0.0)
    while not asking.answers:
        asking.reactor.run_once(0.01)
    assert asking.answers == [(None, DeadlineExceeded.__name__)]
    assert not asking.questions.answered(header(number), memoryview(b"late"), None)


def test_with_the_connection_all_that_is_waited_for_fails_and_no_time_ends_it_again(asking: Asking) -> None:
    asking.ask(deadline_s=0.0)
    asking.ask()
    asking.questions.close(Unavailable("the connection broke"))
    asking.reactor.run_once(0.0)
    assert asking.answers == [(None, "Unavailable")] * 2


def test_an_answer_that_cannot_be_read_is_the_peers_fault_and_what_else_is_raised_is_logged(
    asking: Asking, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(error: Exception) -> int:
        def take(_header: Header | None, _answer: memoryview | KVStoreError) -> None:
            raise error

        return asking.questions.ask(take, 600.0)

    with pytest.raises(ProtocolError):
        asking.questions.answered(header(failing(ProtocolError("what?"))), memoryview(b""), None)
    with caplog.at_level(logging.ERROR):
        assert asking.questions.answered(header(failing(ValueError("ours"))), memoryview(b""), None)
    assert "the receiver of an answer of type 77 failed" in caplog.text


def test_ids_begin_anew_and_none_is_zero(asking: Asking) -> None:
    asking.questions._next_id = 0xFFFFFFFF
    assert [asking.ask(), asking.ask()] == [0xFFFFFFFF, 1]
