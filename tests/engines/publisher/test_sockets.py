"""Promises of sockets.py, over real sockets."""

import contextlib
from collections.abc import Iterator

import pytest
import zmq

from kvstore.engines.publisher.sockets import PublishingSockets
from kvstore.protocol.errors import ConfigError

PATIENCE_MS = 60_000


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as found:
        yield found


@pytest.fixture
def sockets() -> Iterator[PublishingSockets]:
    found = PublishingSockets("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv", kept_batches=3)
    yield found
    found.close()


def test_batches_are_numbered(context: zmq.Context[zmq.Socket[bytes]], sockets: PublishingSockets) -> None:
    with context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"k")
        subscriber.connect(sockets.endpoint)
        while not subscriber.poll(20):  # what is published before it is connected is lost
            sockets.publish(b"batch")
        first, second = subscriber.recv_multipart(), None
        sockets.publish(b"last")
        while second is None or second[2] != b"last":
            assert subscriber.poll(PATIENCE_MS)
            second = subscriber.recv_multipart()
        assert first[0] == second[0] == b"kv"
        assert int.from_bytes(second[1], "big") > int.from_bytes(first[1], "big")


def answered(context: zmq.Context[zmq.Socket[bytes]], sockets: PublishingSockets, first: int) -> list[tuple[int, bytes]]:
    """Return the replayed batches from `first` on."""
    with context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(sockets.replay_endpoint)
        asking.send_multipart((b"", b"no number"))
        asking.send_multipart((b"", first.to_bytes(8, "big")))
        answers: list[list[bytes]] = []
        while not answers or answers[-1][2] != b"\xff" * 8:
            sockets.serve(0.05)
            while asking.poll(0):
                answers.append(asking.recv_multipart())
    assert all(each[:2] == [b"", b"kv"] for each in answers[:-1])
    return [(int.from_bytes(each[2], "big"), each[3]) for each in answers[:-1]]


def test_what_is_kept_is_told_again(context: zmq.Context[zmq.Socket[bytes]], sockets: PublishingSockets) -> None:
    for number in range(5):
        sockets.publish(b"%d" % number)
    assert answered(context, sockets, 3) == [(3, b"3"), (4, b"4")]
    assert answered(context, sockets, 0) == [(2, b"2"), (3, b"3"), (4, b"4")], "older ones are gone"


def test_a_reader_that_is_slow_is_told_all_that_is_kept(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    kept = 2500  # more than ZeroMQ keeps for a peer unless told otherwise, and than fits in buffers of the system
    with (
        contextlib.closing(PublishingSockets("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="", kept_batches=kept)) as sockets,
        context.socket(zmq.DEALER) as asking,
    ):
        for _ in range(kept):
            sockets.publish(bytes(20_000))
        asking.set_hwm(1)
        asking.connect(sockets.replay_endpoint)
        for _ in range(2):
            asking.send_multipart((b"", (0).to_bytes(8, "big")))
            sockets.serve(60)
            numbers: list[int] = []
            while not numbers or numbers[-1] != (1 << 64) - 1:
                assert asking.poll(PATIENCE_MS)
                numbers.append(int.from_bytes(asking.recv_multipart()[2], "big"))
            assert numbers[:-1] == list(range(kept))


def test_without_replays_it_only_waits() -> None:
    sockets = PublishingSockets("tcp://127.0.0.1:*", "", topic="", kept_batches=0)
    sockets.serve(0.001)
    assert sockets.replay_endpoint == ""
    sockets.close()


@pytest.mark.parametrize("where", [("tcp://nowhere.invalid:1", ""), ("tcp://127.0.0.1:*", "tcp"), ("", "")])
def test_an_address_that_cannot_be_bound_says_so(where: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="cannot publish at"):
        PublishingSockets(*where, topic="", kept_batches=1)
