"""Promises of rank_connections.py: one introduced connection a peer, reported when it breaks.

Messages of peers without an introduction are rejected.
"""

import dataclasses
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvstore.handover.description import RankInfo
from kvstore.protocol.errors import InvalidArgument, KVStoreError, ProtocolError, StaleHandle, Unreachable
from kvstore.protocol.frames import HEADER_BYTES, pack_header, unpack_header
from kvstore.protocol.handover_messages import CancelRequest, RankHello, ReadsDone
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Failure, Ok
from kvstore.rpc.address import Address, parse_address
from kvstore.testing.transfer.awaited import eventually
from tests.handover.link_end import End
from tests.handover.loop import running
from tests.ports import free_ports


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with running() as reactor, ExitStack() as stack:
        one, other = End(reactor, 1), End(reactor, 2)
        stack.callback(other.close)
        stack.callback(one.close)
        yield one, other


def test_both_ends_of_one_connection_ask(ends: tuple[End, End]) -> None:
    one, other = ends
    answers = [one.send_request(other.info, bytes([number])) for number in range(3)]
    assert [answer.get(timeout=10) for answer in answers] == [None] * 3
    assert [other.heard.get(timeout=10) for _ in range(3)] == [(1, ReadsDone(bytes([number]))) for number in range(3)]
    assert other.send_request(one.info).get(timeout=10) is None
    assert one.heard.get(timeout=10) == (2, ReadsDone(b"r"))
    one.reactor.call(lambda: one.connections.open(other.info), deadline_s=10)
    assert (one.connections.count, other.connections.count) == (1, 1)


def test_a_peer_that_is_not_there_is_told_to_all_who_waited(ends: tuple[End, End]) -> None:
    one, _ = ends
    info = dataclasses.replace(ends[1].info, control=parse_address(f"127.0.0.1:{free_ports(1)[0]}"))
    assert isinstance(one.send_request(info).get(timeout=10), Unreachable)
    assert one.gone.get(timeout=10)[0] == 2
    for wrong in ("no-such-host.invalid:1", "[fe80::1]:1", "255.255.255.255:1"):
        answers = one.send_request(dataclasses.replace(info, control=parse_address(wrong)))
        assert isinstance(answers.get(timeout=10), Unreachable)
        assert isinstance(one.gone.get(timeout=10)[1], Unreachable)
    assert one.connections.count == 0


class Resolver:
    """The system's, but for one name, of which it is silent until `release`, and then tells the peer's address or its error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, found: str | OSError) -> None:
        self._name, self._found, self._real = name, found, socket.getaddrinfo
        self.is_asked, self._released = threading.Event(), threading.Event()
        self.release = self._released.set
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: str, port: int, **keywords: Any) -> Any:
        if host != self._name or keywords.get("flags", 0) & socket.AI_NUMERICHOST:
            return self._real(host, port, **keywords)
        self.is_asked.set()
        assert self._released.wait(10)
        if isinstance(self._found, OSError):
            raise self._found
        return self._real(self._found, port, **keywords)


def test_while_a_name_is_looked_up_the_loop_serves_others(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ends
    resolver = Resolver(monkeypatch, "slow-host", other.info.control.host)
    slow = dataclasses.replace(other.info, control=other.info.control._replace(host="slow-host"))
    answers = one.send_request(slow)
    assert resolver.is_asked.wait(10)
    assert other.send_request(one.info).get(timeout=10) is None, "while it is silent"
    resolver.release()
    assert answers.get(timeout=10) is None


def test_name_resolved_after_give_up_or_close_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as reactor, ExitStack() as stack:
        one = End(reactor, 1, connect_timeout_s=0.05)
        stack.callback(one.close)
        resolver = Resolver(monkeypatch, "slow-host", "127.0.0.1")
        stack.callback(resolver.release)
        info = dataclasses.replace(one.info, instance=bytes(16), control=one.info.control._replace(host="slow-host"))
        error = one.send_request(info).get(timeout=10)
        assert isinstance(error, Unreachable)
        assert "no answer within 0.05 s" in str(error)
        resolver.release()
        for thread in threading.enumerate():
            if thread.name == "resolve":
                thread.join(10)
        reactor.call(lambda: None, deadline_s=10)
        assert one.connections.count == 0
        assert one.gone.get(timeout=10)[0] == 0
        assert one.gone.empty()


def test_peers_connection_is_used_when_ours_fails() -> None:
    with running() as reactor, ExitStack() as stack:
        one, other = End(reactor, 1, connect_timeout_s=60), End(reactor, 2)
        stack.callback(other.close)
        stack.callback(one.close)
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unheard = dataclasses.replace(other.info, control=Address(host="127.0.0.1", port=silent.getsockname()[1]))
        waiting = one.send_request(unheard, b"first")
        taken, _ = silent.accept()
        assert other.send_request(one.info).get(timeout=10) is None
        assert waiting.get(timeout=10) is None
        assert other.heard.get(timeout=10) == (1, ReadsDone(b"first"))
        taken.close()
        eventually(lambda: not one.connections._opening, "our own is given up")
        assert one.send_request(unheard).get(timeout=10) is None
        assert one.gone.empty()


def test_another_run_at_the_same_address_is_stale(ends: tuple[End, End]) -> None:
    one, other = ends
    earlier = dataclasses.replace(other.info, instance=bytes(16))
    assert isinstance(one.send_request(earlier).get(timeout=10), StaleHandle)
    assert isinstance(one.gone.get(timeout=10)[1], StaleHandle)
    assert other.heard.empty()


def test_broken_connection_is_reported_at_both_ends(ends: tuple[End, End]) -> None:
    one, other = ends
    assert one.send_request(other.info).get(timeout=10) is None
    other.is_silent = True
    waiting = one.send_request(other.info)
    other.heard.get(timeout=10), other.heard.get(timeout=10)
    [session] = other.connections.server.sessions
    other.reactor.call(session.close, deadline_s=10)
    assert isinstance(waiting.get(timeout=10), Unreachable)
    assert isinstance(one.gone.get(timeout=10)[1], Unreachable)
    assert isinstance(other.gone.get(timeout=10)[1], Unreachable)
    other.is_silent = False
    assert one.send_request(other.info).get(timeout=10) is None


class Raw:
    """A peer that sends what the test says."""

    def __init__(self, info: RankInfo) -> None:
        self._socket = socket.create_connection((info.control.host, info.control.port), timeout=10)

    def ask(self, message: Message, *, payload: bytes = b"", type_number: int | None = None) -> KVStoreError | None:
        """The error that it is answered with."""
        body = message.pack()
        head = pack_header(type_number or message.TYPE, 7, len(body), len(payload), 1000)
        self._socket.sendall(head + body + payload)
        header = unpack_header(self._read(HEADER_BYTES))
        answer = self._read(header.body_bytes)
        if header.type == Ok.TYPE:
            return None
        failure = Failure.unpack(answer)
        return KVStoreError(failure.text) if failure.code not in CODES else CODES[failure.code](failure.text)

    def _read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            data = self._socket.recv(size - len(found))
            assert data
            found += data
        return found

    def close(self) -> None:
        self._socket.close()


CODES = {kind.code: kind for kind in (ProtocolError, StaleHandle, InvalidArgument)}


def test_unauthenticated_or_unknown_message_is_rejected(ends: tuple[End, End]) -> None:
    one, other = ends
    raw = Raw(other.info)
    assert isinstance(raw.ask(ReadsDone(b"r")), ProtocolError)
    assert isinstance(raw.ask(RankHello(other.info.instance, b"nonsense")), ProtocolError)
    assert raw.ask(RankHello(other.info.instance, one.info.pack())) is None
    assert raw.ask(RankHello(other.info.instance, one.info.pack())) is None
    assert isinstance(raw.ask(RankHello(other.info.instance, dataclasses.replace(one.info, instance=bytes(16)).pack())), ProtocolError)
    assert list(other.connections._sessions) == [one.info.instance]
    assert isinstance(raw.ask(ReadsDone(b"r"), type_number=200), ProtocolError)
    assert isinstance(raw.ask(CancelRequest(b"r", 1, ""), payload=b"payload"), ProtocolError)
    assert raw.ask(ReadsDone(b"r")) is None
    raw.close()
    assert other.gone.get(timeout=10)[0] == 1
