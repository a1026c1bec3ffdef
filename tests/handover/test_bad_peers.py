"""Ranks that do not keep to the protocol: they are refused with a typed error, their request ends, others' requests do not."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import pytest

from kvstore.handover.config import HandoverSettings
from kvstore.handover.sending import side as sending_side
from kvstore.protocol.errors import Full, InvalidArgument, KVStoreError, ProtocolError, StaleHandle
from kvstore.protocol.handover_messages import PULL, PUSH, CancelRequest, ExportRegions, PartReady, ReadsDone, RequestCache
from kvstore.protocol.message import Message
from kvstore.protocol.settings import Size
from kvstore.testing.transfer.awaited import eventually
from tests.handover.link_end import End
from tests.handover.loop import running
from tests.handover.scene import Executor, layout_of

BLOCKS, TOKENS = [1, 2], 32


class Scene:
    """An honest executor, and a peer that sends any message the test chooses."""

    def __init__(self, stack: ExitStack, *, way: str = "auto", **how: Any) -> None:
        settings = HandoverSettings(deadline_s=20, way=way, direct_min_bytes=Size(0))
        self.honest = stack.enter_context(Executor(layout_of(), settings, **how))
        self.info = self.honest.counterpart(self.honest).ranks[0]
        self.bad = End(stack.enter_context(running()), 9)
        stack.callback(self.bad.close)

    def say(self, message: Message, *, deadline_s: float = 10) -> KVStoreError | None:
        """Send a message and return the error of its response, or None."""
        answers: SimpleQueue[KVStoreError | None] = SimpleQueue()
        act = lambda: self.bad.connections.send_request(self.info, message, deadline_s=deadline_s, on_answer=answers.put)  # noqa: E731
        self.bad.reactor.call(act, deadline_s=10)
        return answers.get(timeout=10)

    def heard(self) -> Message:
        """Return the next message that the bad peer receives."""
        return self.bad.heard.get(timeout=10)[1]

    def receive(self, request_id: bytes) -> Any:
        """Begin a receive of the honest rank from the bad one, and return once its request has arrived."""
        transceiver = self.honest.ranks[0].transceiver
        source = transceiver.connect([self.bad.info.pack()])
        receiving = transceiver.receive(request_id, BLOCKS, tokens=TOKENS, source=source)
        assert isinstance(self.heard(), RequestCache)
        return receiving


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack)


def asking(request_id: bytes, **changes: Any) -> RequestCache:
    ask = RequestCache(request_id, TOKENS, 0, BLOCKS, PULL, [])
    for name, value in changes.items():
        setattr(ask, name, value)
    return ask


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"mode": 9}, InvalidArgument),
        ({"dp": 3}, InvalidArgument),
        ({"part_bytes": 1 << 20, "slots": 0}, ProtocolError),
        ({"mode": PUSH, "regions": [b"nonsense"]}, ProtocolError),
    ],
)
def test_invalid_request_fails_on_both_sides(scene: Scene, changes: dict[str, Any], error: type[KVStoreError]) -> None:
    [sending] = scene.honest.send(b"r", BLOCKS, TOKENS)
    assert isinstance(scene.say(asking(b"r", **changes)), error)
    with pytest.raises(error):
        sending.wait()
    assert isinstance(scene.say(asking(b"r")), error)


def test_who_asks_twice_is_refused(scene: Scene) -> None:
    [sending] = scene.honest.send(b"r", BLOCKS, TOKENS)
    assert scene.say(asking(b"r")) is None
    assert isinstance(scene.say(asking(b"r")), ProtocolError)
    with pytest.raises(ProtocolError, match="requested this already"):
        sending.wait()


def test_uninvolved_rank_cannot_offer_confirm_or_cancel(scene: Scene) -> None:
    with Executor(layout_of()) as other:
        [receiving] = scene.honest.receive(b"r", BLOCKS, TOKENS, other)
        [sending] = scene.honest.send(b"s", BLOCKS, TOKENS)
        for message in (
            PartReady(b"r", 0, 4, 0, 0, 0),
            ReadsDone(b"r"),
            ExportRegions(b"r", [], []),
            CancelRequest(b"r", 606, ""),
            CancelRequest(b"s", 606, ""),
        ):
            assert isinstance(scene.say(message), StaleHandle)
        assert not receiving.is_over
        assert not sending.is_over
        assert isinstance(scene.say(CancelRequest(b"t", 0, "")), ProtocolError)


@pytest.mark.parametrize("message", [PartReady(b"r", 0, 5, 0, 0, 10), PartReady(b"r", 3, 3, 0, 0, 10), PartReady(b"r", 0, 4, 1, 0, 10)])
def test_a_part_that_nobody_wanted_ends_the_request(scene: Scene, message: PartReady) -> None:
    scene.bad.info = _of_engine(scene)
    receiving = scene.receive(b"r")
    assert isinstance(scene.say(message), ProtocolError)
    with pytest.raises(ProtocolError, match="was not requested"):
        receiving.wait()
    assert isinstance(scene.say(message), StaleHandle)


def test_export_or_confirmation_to_a_pushed_receiver_is_rejected(scene: Scene) -> None:
    scene.bad.info = _of_engine(scene)
    receiving = scene.receive(b"r")
    assert isinstance(scene.say(ExportRegions(b"r", [], [])), ProtocolError)
    assert isinstance(scene.say(ReadsDone(b"r")), ProtocolError)
    assert not receiving.is_over


def _of_engine(scene: Scene) -> Any:
    """The bad peer, with the honest engine's description: it does not move a byte."""
    info = dataclasses.replace(scene.bad.info, engine=scene.info.engine)
    scene.bad.connections.description = info.pack()
    return info


# --- asks that come before their request ---


def test_early_invalid_request_is_cancelled_once_it_begins(scene: Scene) -> None:
    assert scene.say(asking(b"r", tokens=31)) is None
    [sending] = scene.honest.send(b"r", BLOCKS, TOKENS)
    with pytest.raises(InvalidArgument, match="requests 31"):
        sending.wait()
    stop = scene.heard()
    assert isinstance(stop, CancelRequest)
    assert stop.code == InvalidArgument.code


def test_early_requests_expire_with_deadline_or_peer(scene: Scene) -> None:
    [rank] = scene.honest.ranks
    assert scene.say(asking(b"late"), deadline_s=0.5) is None
    eventually(lambda: rank.transceiver.early_request_count == 0, "the ask is forgotten")
    assert scene.say(asking(b"gone")) is None
    assert rank.transceiver.early_request_count == 1
    scene.bad.reactor.call(scene.bad.connections.close, deadline_s=10)
    eventually(lambda: rank.transceiver.early_request_count == 0, "the ask is forgotten")


def test_there_is_a_limit_to_early_asks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending_side, "MAX_EARLY_REQUESTS", 1)
    assert scene.say(asking(b"1")) is None
    assert isinstance(scene.say(asking(b"2")), Full)


def test_ranks_of_two_executors_do_not_get_one_request(scene: Scene) -> None:
    [sending] = scene.honest.send(b"r", BLOCKS, TOKENS)
    assert scene.say(asking(b"r")) is None
    with running() as reactor:
        other = End(reactor, 8)
        other.connections.description = dataclasses.replace(other.info, layout=layout_of(tp=2)).pack()
        answers: SimpleQueue[KVStoreError | None] = SimpleQueue()
        act = lambda: other.connections.send_request(scene.info, asking(b"r"), deadline_s=10, on_answer=answers.put)  # noqa: E731
        reactor.call(act, deadline_s=10)
        assert isinstance(answers.get(timeout=10), InvalidArgument)
        other.close()
    with pytest.raises(InvalidArgument, match="not of one executor"):
        sending.wait()


def test_part_announced_before_its_regions_fails_the_request() -> None:
    with ExitStack() as stack:
        scene = Scene(stack, way="pull")
        scene.bad.info = _of_engine(scene)
        receiving = scene.receive(b"r")
        assert isinstance(scene.say(PartReady(b"r", 0, 4, 0, 0, 10)), ProtocolError)
        with pytest.raises(ProtocolError, match="announced before the regions"):
            receiving.wait()
