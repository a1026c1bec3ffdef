"""Promises of the giving side where one receiver rank is gone while parts are handed to several."""

import socket
from contextlib import ExitStack
from typing import Any

import pytest

from kvstore.handover.config import HandoverSettings
from kvstore.handover.sending.side import SenderSide
from kvstore.protocol.errors import Unreachable
from kvstore.protocol.settings import Size
from kvstore.testing.transfer.awaited import eventually
from tests.handover.scene import DIRECT, GATHERED, Rank, layout_of

BLOCKS, TOKENS = [1, 2], 32


def settings(**ways: Any) -> HandoverSettings:
    return HandoverSettings(deadline_s=20, min_layer_batch_bytes=Size(0), **ways)


def test_unreachable_receiver_ends_sending_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket may report at once that its peer is dead. The request is then over and its blocks may be reused, although parts for the next
    receiver are still queued."""
    with ExitStack() as stack:
        source = Rank(layout_of(), 0, settings(), transports="shm,tcp")
        stack.callback(source.close)
        takers = []
        for rank, way in enumerate((settings(way="pull", **DIRECT), settings(way="push", **GATHERED))):
            takers.append(Rank(layout_of(tp=2), rank, way, transports="shm,tcp"))
            stack.callback(takers[-1].close)
        sides = [taker.transceiver for taker in takers]
        descriptions = [side.describe() for side in sides]
        for side in sides:
            side.join(descriptions)
        requests = source.transceiver._requests
        given = source.transceiver.send(b"r", BLOCKS, tokens=TOKENS)
        for number, side in enumerate(sides, 1):  # one after the other: parts are handed out in the order of their asks
            side.receive(b"r", BLOCKS, tokens=TOKENS, source=side.connect([source.transceiver.describe()]))
            eventually(lambda number=number: len(requests.sender._requests[b"r"].senders) == number, "the receiver's ask")  # type: ignore[misc]
        gone = requests.connections._sessions[sides[0]._instance]
        ready, handed_out = SenderSide.layer_ready, list[object]()

        def ready_when_the_first_is_gone(self: SenderSide, request_id: bytes, layer: int | None) -> None:
            gone._sock.shutdown(socket.SHUT_WR)
            monkeypatch.setattr(requests.resources.worker, "submit", handed_out.append)
            ready(self, request_id, layer)

        monkeypatch.setattr(SenderSide, "layer_ready", ready_when_the_first_is_gone)
        given.all_ready()
        with pytest.raises(Unreachable):
            given.wait()
        assert given.is_fenced
        assert not handed_out
        monkeypatch.undo()
