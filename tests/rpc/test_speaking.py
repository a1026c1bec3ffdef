"""Promises of speaking.py; test_session.py has what holds on a connection."""

import logging
import socket
from collections.abc import Iterator

import pytest

from kvstore.protocol.errors import ProtocolError, Unavailable
from kvstore.protocol.frames import HEADER_BYTES, Header, unpack_header
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.session_messages import Failure, Flags, Hello, Trace
from kvstore.rpc.outbox import SendLimits
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.speaking import Speaker
from tests.rpc.traced import sampled
from tests.rpc.wires import Clock, Replies, read_exactly, read_frame

EXISTS = Exists([b"key"])


class Mouth:
    def __init__(self) -> None:
        mine, self.peer = socket.socketpair()
        mine.setblocking(False)
        self.peer.settimeout(10)
        self.mine = mine
        self.clock = Clock()
        self.reactor = Reactor(self.clock)
        self.reasons: list[str] = []
        self.queued = 0
        self.speaker = Speaker(self.reactor, mine, SendLimits(timeout_s=5), hang_up=self.reasons.append, has_queued=self.note)

    def note(self) -> None:
        self.queued += 1

    def close(self) -> None:
        self.speaker.let_go()
        self.reactor.close()
        self.mine.close()
        self.peer.close()


@pytest.fixture
def mouth() -> Iterator[Mouth]:
    mouth = Mouth()
    yield mouth
    mouth.close()


def test_a_message_goes_with_its_deadline_and_payload(mouth: Mouth) -> None:
    mouth.speaker.say(Hello(1, "red", ticket=b"a ticket"), 7, 5, [b"value"])
    header = unpack_header(read_exactly(mouth.peer, HEADER_BYTES))
    assert header._replace(body_bytes=0) == Header(Hello.TYPE, 7, 5, 0, 5)
    assert Hello.unpack(read_exactly(mouth.peer, header.body_bytes)).tenant == "red"
    assert read_exactly(mouth.peer, 5) == b"value"
    assert (mouth.queued, mouth.reasons) == (0, [])


def test_a_question_gets_its_answer_once(mouth: Mouth) -> None:
    replies = Replies()
    mouth.speaker.ask(EXISTS, replies, 5)
    header, message, _ = read_frame(mouth.peer)
    assert (message, header.deadline_ms) == (EXISTS, 5001)
    body = Flags(b"\1").pack()
    answer = Header(Flags.TYPE, header.request_id, 0, len(body), 0)
    mouth.speaker.heard(answer, memoryview(body))
    mouth.speaker.heard(answer, memoryview(body))
    assert replies.bodies == [body]


def test_an_error_is_the_answer_and_one_of_a_peer_that_could_not_read_us_ends_it(mouth: Mouth) -> None:
    replies = Replies()
    mouth.speaker.ask(EXISTS, replies, 5)
    body = Failure(ProtocolError.code, "what is that?").pack()
    for request_id in (1, 0):
        mouth.speaker.heard(Header(Failure.TYPE, request_id, 0, len(body), 0), memoryview(body))
    assert [str(error) for error in replies.errors] == ["what is that?"]
    assert mouth.reasons == ["what is that?"]


def test_who_waits_for_an_answer_hears_that_the_connection_is_gone(mouth: Mouth) -> None:
    replies = Replies()
    mouth.speaker.ask(EXISTS, replies, 5)
    mouth.speaker.close(Unavailable("gone"))
    assert [str(error) for error in replies.errors] == ["gone"]


def test_a_traced_call_is_announced_to_a_peer_that_takes_it(mouth: Mouth) -> None:
    with sampled():
        mouth.speaker.announce()
        mouth.speaker.takes_traces = True
        mouth.speaker.announce()
    mouth.speaker.announce()
    mouth.speaker.say(EXISTS, 1)
    assert [read_frame(mouth.peer)[0].type for _ in range(2)] == [Trace.TYPE, Exists.TYPE]
    mouth.peer.close()
    with sampled():
        mouth.speaker.announce()
    assert len(mouth.reasons) == 1


def test_a_peer_that_does_not_take_what_it_is_sent_is_hung_up_on(mouth: Mouth, caplog: pytest.LogCaptureFixture) -> None:
    mouth.speaker.say(EXISTS, 1, 0, [bytes(16 << 20)])
    assert mouth.queued == 1
    mouth.clock.now_ns = 4_900_000_000
    mouth.reactor.run_once(0)
    assert mouth.reasons == []
    with caplog.at_level(logging.WARNING):
        mouth.clock.now_ns = 5_100_000_000
        mouth.reactor.run_once(0)
    assert mouth.reasons == ["an answer was not taken within 5 s"]
    assert "hanging up" in caplog.text


def test_the_time_of_the_next_message_begins_when_it_was_said(mouth: Mouth) -> None:
    mouth.speaker.say(EXISTS, 1, 0, [bytes(16 << 20)])
    mouth.clock.now_ns = 3_000_000_000
    mouth.speaker.say(EXISTS, 2, 0, [bytes(16 << 20)])
    while mouth.speaker.outbox.oldest_ns == 0:
        mouth.peer.recv(1 << 20)
        mouth.speaker.outbox.flush()
    mouth.clock.now_ns = 5_100_000_000
    mouth.reactor.run_once(0)
    assert mouth.reasons == [], "the first one was taken"
    mouth.clock.now_ns = 8_100_000_000
    mouth.reactor.run_once(0)
    assert len(mouth.reasons) == 1


def test_a_broken_connection_is_hung_up_on(mouth: Mouth) -> None:
    mouth.peer.close()
    mouth.speaker.say(EXISTS, 1)
    assert len(mouth.reasons) == 1
    mouth.speaker.let_go()
    assert mouth.speaker.outbox.queued_bytes == 0
