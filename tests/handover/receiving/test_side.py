"""Promises of the taking side where one sender rank is gone while several are asked."""

import socket

import pytest

from kvstore.handover.config import HandoverSettings
from kvstore.handover.description import RankInfo
from kvstore.handover.handles import ReceiveHandle
from kvstore.handover.ranks.rank_connections import RankConnections
from kvstore.handover.receiving.side import ReceiveRequest, ReceiverSide
from kvstore.protocol.errors import Unreachable
from kvstore.protocol.handover_messages import RequestCache
from kvstore.protocol.message import Message
from tests.handover.scene import Executor, layout_of

BLOCKS, TOKENS = [1, 2], 32


def test_once_a_sender_is_found_gone_the_others_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other senders already know that the request is over. They would keep a request that no cancel removes."""
    settings = HandoverSettings(deadline_s=20, way="push")
    with Executor(layout_of(tp=2), settings) as source, Executor(layout_of(), settings) as destination:
        [handle] = destination.receive(b"first", BLOCKS, TOKENS, source)
        for given in source.send(b"first", BLOCKS, TOKENS):
            given.all_ready()
        handle.wait()
        connections = destination.ranks[0].transceiver._requests.connections
        gone = connections._sessions[source.ranks[0].transceiver._instance]
        begin, send_request, asked = ReceiverSide.begin, RankConnections.send_request, list[int]()

        def begin_when_the_first_is_gone(self: ReceiverSide, handle: ReceiveHandle, wanted: ReceiveRequest) -> None:
            gone._sock.shutdown(socket.SHUT_WR)
            begin(self, handle, wanted)

        def noted(self: RankConnections, info: RankInfo, message: Message, **how: object) -> None:
            if isinstance(message, RequestCache):
                asked.append(info.rank)
            send_request(self, info, message, **how)  # type: ignore[arg-type]

        monkeypatch.setattr(ReceiverSide, "begin", begin_when_the_first_is_gone)
        monkeypatch.setattr(RankConnections, "send_request", noted)
        [handle] = destination.receive(b"second", BLOCKS, TOKENS, source)
        with pytest.raises(Unreachable):
            handle.wait()
        assert handle.is_fenced
        assert asked == [0]
        monkeypatch.undo()
