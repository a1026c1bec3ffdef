"""One end of control connections, for tests: it keeps what it hears and says what the test wants."""

from queue import SimpleQueue

from kvstore.handover.config import HandoverSettings
from kvstore.handover.description import RankInfo
from kvstore.handover.ranks.rank_connections import Answer, RankConnections
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.handover_messages import ReadsDone
from kvstore.protocol.message import Message
from kvstore.rpc.address import parse_address
from kvstore.rpc.reactor import Reactor
from tests.handover.scene import layout_of


class End:
    """One rank's links, which keep what they receive and answer it with `answer`."""

    def __init__(self, reactor: Reactor, number: int, *, connect_timeout_s: float = 5.0) -> None:
        self.reactor = reactor
        self.answer: KVStoreError | None = None
        self.is_silent = False
        self.heard: SimpleQueue[tuple[int, Message]] = SimpleQueue()
        self.gone: SimpleQueue[tuple[int, KVStoreError]] = SimpleQueue()
        instance = bytes([number] * 16)
        self.connections = RankConnections(reactor, HandoverSettings(connect_timeout_s=connect_timeout_s), instance, self)
        address = reactor.call(lambda: self.connections.server.listen_tcp("127.0.0.1", 0), deadline_s=10)
        self.info = RankInfo(instance=instance, rank=0, control=parse_address(address), layout=layout_of(), engine=b"", host=str(number))
        self.connections.description = self.info.pack()

    def received(self, peer: RankInfo, message: Message, header: FrameHeader, answer: Answer) -> None:
        self.heard.put((peer.instance[0], message))
        if not self.is_silent:
            answer(self.answer)

    def lost(self, peer: RankInfo, error: KVStoreError) -> None:
        self.gone.put((peer.instance[0], error))

    def send_request(self, info: RankInfo, request_id: bytes = b"r", *, deadline_s: float = 10) -> "SimpleQueue[KVStoreError | None]":
        answers: SimpleQueue[KVStoreError | None] = SimpleQueue()
        act = lambda: self.connections.send_request(info, ReadsDone(request_id), deadline_s=deadline_s, on_answer=answers.put)  # noqa: E731
        self.reactor.call(act, deadline_s=10)
        return answers

    def close(self) -> None:
        self.reactor.call(self.connections.close, deadline_s=10)
