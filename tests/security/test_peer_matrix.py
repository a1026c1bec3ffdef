"""Every frame that peers send only to one another, by kind of sender, over real sockets.

- between transfer engines: by the credentials of the join and by the region's key
- between ranks of a hand-over: by the run in the greeting

The table of permissions is written here independently: a new frame has no row, and fails here first.
"""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from inspect import isclass
from typing import Final

import pytest

from kvstore.protocol import handover_messages, transfers
from kvstore.protocol.errors import Denied, KVStoreError, ProtocolError, from_code
from kvstore.protocol.frames import HEADER, HEADER_BYTES, MAGIC, VERSION, unpack_header
from kvstore.protocol.handover_messages import (
    CancelRequest,
    ExportRegions,
    PartReady,
    RankHello,
    RankReport,
    ReadsDone,
    RequestCache,
    RequestEnded,
)
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Failure
from kvstore.protocol.transfers import Attach, Fence, JoinEngine, JoinReply, Notice, ReadRegions, WriteRegions
from kvstore.transfer.memory.region import Exports, Region
from tests.handover.link_end import End
from tests.handover.loop import running
from tests.rpc.raw_peers import PATIENCE_S, RawAsker, a_target, fetch, make_region, read, shown, store

SECRET: Final = b"of this engine's description"
JOINS: Final = {"nobody": None, "no secret": b"", "wrong": b"a guess", "another engine's": SECRET[:-1] + b"N", "who was told": SECRET}
ENGINES: Final[dict[type[Message], frozenset[str]]] = dict.fromkeys((ReadRegions, WriteRegions, Fence, Notice), frozenset({"who was told"}))
BY_UNIX_SOCKET: Final = {Attach}
"""Its user alone connects there, and shows the region's key: tests/transfer/shm/test_target.py."""
RANKS: Final[dict[type[Message], Message]] = {
    kind: message
    for message in (
        RequestCache(b"r", 1, 0, [], 0, []),
        ExportRegions(b"r", [], []),
        PartReady(b"r", 0, 1, 0, 0, 0),
        ReadsDone(b"r"),
        CancelRequest(b"r", 1, ""),
        RankReport(b"r", 0),
        RequestEnded(b"r", 0, ""),
    )
    if (kind := type(message))
}


def said_in(module: object) -> set[type[Message]]:
    return {kind for kind in vars(module).values() if isclass(kind) and issubclass(kind, Message) and kind is not Message}


@pytest.mark.promise("authentication")
def test_there_is_a_row_for_every_frame() -> None:
    assert said_in(transfers) == {*ENGINES, *BY_UNIX_SOCKET, JoinEngine, JoinReply}
    assert said_in(handover_messages) == {*RANKS, RankHello}


@pytest.fixture
def region() -> Iterator[tuple[Exports, Region]]:
    exports = Exports()
    found = make_region(4, b"ours")
    exports.add(found)
    yield exports, found
    found.close()


def asked(kind: type[Message], region: Region, *, key: int) -> tuple[Message, bytes]:
    piece = shown(region)._replace(key=key), 0, 4
    return {
        ReadRegions: (fetch([piece]), b""),
        WriteRegions: (store([piece]), b"them"),
        Fence: (Fence([7]), b""),
        Notice: (Notice(b"n"), b""),
    }[kind]


@pytest.mark.promise("authentication")
@pytest.mark.parametrize("kind", ENGINES, ids=lambda kind: kind.__name__)
def test_engine_accepts_frames_only_after_its_secret(kind: type[Message], region: tuple[Exports, Region]) -> None:
    exports, memory = region
    taken = set()
    with a_target(exports, SECRET, stall_timeout_s=PATIENCE_S) as (_target, metadata):
        for name, secret in JOINS.items():
            with RawAsker(metadata) as peer:
                if secret is not None:
                    peer.send(JoinEngine("peer", 1, secret))
                    joined = peer.answer()[0].type == JoinReply.TYPE
                    assert joined is (secret == SECRET)
                message, payload = asked(kind, memory, key=memory.write_key)
                peer.send(message, payload)
                try:
                    if peer.answer()[0].type != Failure.TYPE:
                        taken.add(name)
                except (EOFError, ConnectionResetError):  # the connection was closed
                    pass
    assert taken == ENGINES[kind]
    assert bytes(memory.memory) == (b"them" if kind is WriteRegions else b"ours")


def test_who_has_joined_reads_and_writes_what_he_has_the_key_of(region: tuple[Exports, Region]) -> None:
    exports, memory = region
    with a_target(exports, SECRET, stall_timeout_s=PATIENCE_S) as (_target, metadata), RawAsker(metadata) as peer:
        peer.join(secret=SECRET)
        for kind, keys in {ReadRegions: (1,), WriteRegions: (1, memory.read_key)}.items():
            for key in keys:
                peer.send(*asked(kind, memory, key=key))
                assert isinstance(peer.failure(), Denied)
    assert bytes(memory.memory) == b"ours"


@pytest.mark.promise("authentication")
@pytest.mark.parametrize("kind", RANKS, ids=lambda kind: kind.__name__)
def test_rank_accepts_frames_only_after_hello_to_this_run(kind: type[Message]) -> None:
    with running() as reactor, ExitStack() as stack:
        one, other = End(reactor, 1), End(reactor, 2)
        stack.callback(other.close)
        stack.callback(one.close)
        greetings = {
            "nobody": None,
            "of another run": RankHello(bytes(16), one.info.pack()),
            "a rank": RankHello(other.info.instance, one.info.pack()),
        }
        for name, greet in greetings.items():
            with closing(socket.create_connection((other.info.control.host, other.info.control.port), timeout=PATIENCE_S)) as sock:
                errors = [error_of(sock, message) for message in (greet, RANKS[kind]) if message is not None]
            if name == "a rank":
                assert errors == [None, None]
                assert other.heard.get(timeout=PATIENCE_S)[0] == 1
            else:
                assert isinstance(errors[-1], ProtocolError)
                assert other.heard.empty()


def error_of(sock: socket.socket, message: Message) -> KVStoreError | None:
    body = message.pack()
    sock.sendall(HEADER.pack(MAGIC, VERSION, message.TYPE, 1, 60_000, len(body), 0) + body)
    header = unpack_header(read(sock, HEADER_BYTES))
    answer = read(sock, header.body_bytes)
    if header.type != Failure.TYPE:
        return None
    failure = Failure.unpack(answer)
    return from_code(failure.code, failure.text)
