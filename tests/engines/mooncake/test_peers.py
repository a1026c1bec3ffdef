"""Answers of engines to handshakes, and peers that answer something else."""

import socket
import struct
import threading
from collections.abc import Callable

import pytest

from kvstore.engines.mooncake import peers
from kvstore.engines.mooncake.peers import HandshakeReply, HandshakeServer, RegisteredSegment, handshake, unpacked
from kvstore.protocol.errors import ProtocolError, Unreachable

ANSWER = HandshakeReply(b"engine", [RegisteredSegment(4096, 10, b"\0region"), RegisteredSegment(1, 2, b"")])


def answered(reply: bytes, call: Callable[[str], object]) -> None:
    """Run `call` with the address of a peer that sends `reply` and closes its connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        call(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()


def test_answer_is_read_as_it_was_sent() -> None:
    server = HandshakeServer("127.0.0.1", 0, ANSWER.packed)
    assert handshake(f"127.0.0.1:{server.port}") == handshake(f"127.0.0.1:{server.port}") == ANSWER
    server.close()
    with pytest.raises(Unreachable):
        handshake(f"127.0.0.1:{server.port}")


def test_failed_answer_is_not_the_next_one_s() -> None:
    answers = iter([None, ANSWER.packed()])

    def answer() -> bytes:
        found = next(answers)
        if found is None:
            raise ZeroDivisionError("once")
        return found

    server = HandshakeServer("127.0.0.1", 0, answer)
    with pytest.raises(Unreachable):
        handshake(f"127.0.0.1:{server.port}")
    assert handshake(f"127.0.0.1:{server.port}") == ANSWER
    server.close()


@pytest.mark.parametrize("data", [b"", b"x", b"{}", b"[]", b'{"engine": "", "segments": [[1]]}', b'{"engine": "!", "segments": 5}'])
def test_other_bytes_are_no_answer(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpacked(data)


def test_peer_that_answers_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> None:
        with pytest.raises((Unreachable, ProtocolError)):
            handshake(name)

    for reply in (b"", b"ab", struct.pack("<I", 100) + b"short", struct.pack("<I", 1 << 31), struct.pack("<I", 2) + b"{}"):
        answered(reply, refused)
    monkeypatch.setattr(peers, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreachable):
        handshake(f"127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize("name", ["", "host", "127.0.0.1:x", "127.0.0.1:70000", "127.0.0.1:-1"])
def test_name_that_is_no_address_is_unreachable(name: str) -> None:
    with pytest.raises(Unreachable):
        handshake(name)
