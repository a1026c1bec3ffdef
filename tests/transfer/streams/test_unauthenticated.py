"""Pending handshakes end at their timeout or when there are too many; bytes are read as they arrive."""

import pytest

from kvstore.protocol.errors import ProtocolError, Unreachable
from kvstore.protocol.frames import HEADER_BYTES, pack_header
from kvstore.protocol.transfers import JoinEngine, ReadRegions
from kvstore.transfer.streams import unauthenticated as module
from kvstore.transfer.streams.tcp import TcpConnection
from kvstore.transfer.streams.unauthenticated import HandshakeState, PendingHandshakes

BODY = JoinEngine("name", 7, b"secret").pack()
JOIN = pack_header(JoinEngine.TYPE, 3, len(BODY), 0) + BODY


class Arriving:
    """A connection on which each piece of `said` arrives separately."""

    def __init__(self, *said: bytes) -> None:
        self.said = list(said)

    def recv_arrived(self, part: memoryview) -> int:
        if not self.said or not self.said[0]:
            del self.said[:1]
            return 0
        taken = self.said[0][: len(part)]
        part[: len(taken)] = taken
        self.said[0] = self.said[0][len(taken) :]
        return len(taken)


def receive(greeting: HandshakeState, *said: bytes) -> JoinEngine | None:
    connection: TcpConnection = Arriving(*said)  # type: ignore[assignment]
    return greeting.receive(connection)


def test_a_join_is_heard_however_it_is_cut() -> None:
    for cut in range(len(JOIN) + 1):
        greeting = HandshakeState()
        assert receive(greeting, JOIN[:cut]) == (JoinEngine("name", 7, b"secret") if cut == len(JOIN) else None)
        assert greeting.request_id == (3 if cut >= HEADER_BYTES else 0)
        if cut < len(JOIN):
            assert receive(greeting, JOIN[cut:]) == JoinEngine("name", 7, b"secret")


@pytest.mark.parametrize(
    "data",
    [
        b"x" * HEADER_BYTES,
        pack_header(ReadRegions.TYPE, 3, 0, 0),
        pack_header(JoinEngine.TYPE, 3, module.MAX_JOIN_BYTES + 1, 0),
        pack_header(JoinEngine.TYPE, 3, len(BODY), 1),
        pack_header(JoinEngine.TYPE, 3, 1, 0) + b"x",
    ],
    ids=["no header", "another message", "too long", "a payload", "no body of a Join"],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        receive(HandshakeState(), data)


def test_one_that_was_refused_may_send_a_little_more() -> None:
    greeting = HandshakeState()
    greeting.is_refused = True
    assert receive(greeting, JOIN) is None
    with pytest.raises(Unreachable):
        receive(greeting, bytes(module.MAX_DISCARDED_BYTES))


def test_strangers_leave_in_time_or_for_others() -> None:
    strangers: PendingHandshakes[str] = PendingHandshakes(max_pending=2, timeout_s=1e-9 * 10)
    assert strangers.next_ns() is None
    assert strangers.add("a", 0) is None
    assert strangers.add("b", 5) is None
    assert strangers.next_ns() == 10
    assert strangers.add("c", 6) == "a"
    strangers.shorten("c", 7)
    strangers.shorten("b", 100)
    strangers.shorten("a", 1)
    assert strangers.next_ns() == 7
    assert strangers.expire(6) == []
    assert strangers.expire(7) == ["c"]
    strangers.remove("c")
    strangers.remove("b")
    assert strangers.expire(1000) == []
