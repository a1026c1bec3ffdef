"""Promises of connect_to, and of sessions, servers and both kinds of channel over TLS: what they promise of plain
sockets holds.
"""

import asyncio
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, ProtocolError, Unauthorized, Unavailable, Untrusted
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.master_messages import Exists, Nodes
from kvstore.protocol.node_messages import Put
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, SERVER_MASTER, SERVER_NODE, Count, Failure, Flags, Hello, Ok, Welcome
from kvstore.rpc.address import Address, connect_to, parse_address
from kvstore.rpc.client.async_channel import AsyncChannel
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.server import ConnectionLimits, Server
from kvstore.rpc.server.session import Session
from kvstore.rpc.server.tls_session import MAX_REFUSED_BYTES
from kvstore.security.tls.certificates import Certificates
from kvstore.testing.transfer.awaited import PATIENCE_S, in_background
from tests.rpc.wires import Clock, Recorder, Replies, frame, pump, read_frame
from tests.security.tls.certified import certificates, shared

HELLO = Hello(ROLE_CLIENT, "red")
MIB = 1 << 20


class Daemon:
    """Over TLS, in a thread.

    Answers Put with how many bytes came, Exists with a payload of the keys' sizes in MiB, the rest with Ok.
    """

    def __init__(self, tls: Certificates | None, *, name: str = "m", server: int = SERVER_MASTER, room: str = "now") -> None:
        self.reactor = Reactor()
        self.handler = Recorder(room=room, on_frame=self._answer)
        self._welcome = Welcome(server, name)
        self.server = Server(self.reactor, self.handler, ConnectionLimits(10), tls=tls)
        self.address = parse_address(self.server.listen_tcp("127.0.0.1", 0))
        self._running = in_background(self.reactor.run)

    def _answer(self, session: Session, header: FrameHeader, body: bytes) -> None:
        if header.type == Hello.TYPE:
            session.context = "known"
            session.reply(header.request_id, self._welcome)
        elif header.type == Put.TYPE:
            session.reply(header.request_id, Count(sum(self.handler.memory)))
        elif header.type == Exists.TYPE:
            keys = Exists.unpack(memoryview(body)).keys
            session.reply(header.request_id, Flags(b"\1" * len(keys)), [bytes([key[0]]) * (len(key) * MIB // 4) for key in keys])
        else:
            session.reply(header.request_id, Ok())

    def close(self) -> None:
        self.reactor.stop()
        self._running.result(PATIENCE_S)
        self.server.close()
        self.reactor.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Daemon]]:
    made: list[Daemon] = []

    def make(*arguments: object, **settings: object) -> Daemon:
        made.append(Daemon(*arguments, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for daemon in made:
        daemon.close()


def client() -> Certificates:
    return certificates(shared().client("red"))


def master() -> Certificates:
    return certificates(shared().master())


def put(values: list[bytes]) -> Put:
    zeros = [0] * len(values)
    return Put(
        "", [b"key-%d" % number for number in range(len(values))], [len(value) for value in values], zeros, zeros, [b""] * len(values)
    )


def test_a_blocking_channel_moves_values_both_ways(make: Callable[..., Daemon]) -> None:
    daemon = make(master())
    channel = Channel.open(daemon.address, HELLO, Deadline(PATIENCE_S), tls=client())
    assert channel.certified is not None
    value = random.Random(1).randbytes(5 * MIB + 3)
    for _ in range(3):
        assert channel.call(put([value]), Count, Deadline(PATIENCE_S), [memoryview(value)]).value == sum(value)
        channel.call(Exists([b"aaaa", b"b"]), Flags, Deadline(PATIENCE_S))
        rooms = bytearray(MIB), bytearray(MIB // 4)
        channel.read_into([memoryview(room) for room in rooms], Deadline(PATIENCE_S))
        assert (bytes(rooms[0]), bytes(rooms[1])) == (b"a" * MIB, b"b" * (MIB // 4))
        assert channel.is_quiet()
        assert not channel.is_closed_by_peer()
    channel.close()


def test_values_received_with_the_answer_need_no_poll(make: Callable[..., Daemon]) -> None:
    daemon = make(master())
    channel = Channel.open(daemon.address, HELLO, Deadline(PATIENCE_S), tls=client())
    channel.ask(Exists([b"aaaa"]), Deadline(PATIENCE_S))
    while channel.take_answer(Flags) is None:
        pass
    room = memoryview(bytearray(MIB))
    pending = channel.values_into([room[at : at + 1024] for at in range(0, MIB, 1024)])
    while not channel.take_values(pending):
        pass
    assert room == b"a" * MIB
    channel.close()


def test_an_asynchronous_channel_does_the_same(make: Callable[..., Daemon]) -> None:
    daemon = make(master())

    async def use() -> None:
        channel = await AsyncChannel.open(daemon.address, HELLO, Deadline(PATIENCE_S), tls=client())
        value = random.Random(2).randbytes(5 * MIB + 3)
        for _ in range(3):
            assert (await channel.call(put([value]), Count, Deadline(PATIENCE_S), [memoryview(value)])).value == sum(value)
            await channel.call(Exists([b"aaaa"]), Flags, Deadline(PATIENCE_S))
            room = bytearray(MIB)
            await channel.read_into([memoryview(room)], Deadline(PATIENCE_S))
            assert room == b"a" * MIB
        channel.close()

    asyncio.run(use())


def test_decrypted_requests_are_served_without_another_event(make: Callable[..., Daemon]) -> None:
    """Two requests and a payload in one record, and a node that has room for the payload only later."""
    daemon = make(master(), room="later")
    channel = Channel.open(daemon.address, HELLO, Deadline(PATIENCE_S), tls=client())
    first = put([b"x" * 5000])
    sock = channel.detach()
    sock.setblocking(True)
    sock.send(frame(first, 7, b"x" * 5000) + frame(Nodes(), 8) + frame(Nodes(), 9))
    while not daemon.handler.waiting:
        pass
    session = daemon.handler.waiting[0]
    daemon.reactor.call(lambda: session.accept_payload(daemon.handler.views()), deadline_s=PATIENCE_S)
    assert [read_frame(sock)[0].request_id for _ in range(3)] == [7, 8, 9]
    assert session.certified is not None
    sock.close()


def test_record_larger_than_the_buffer_is_read_completely(make: Callable[..., Daemon]) -> None:
    daemon = make(master())
    channel = Channel.open(daemon.address, HELLO, Deadline(PATIENCE_S), tls=client())
    sock = channel.detach()
    sock.setblocking(True)
    count = 20_000
    sending = in_background(lambda: sock.sendall(b"".join(frame(Nodes(), number) for number in range(1, count + 1))))
    assert [read_frame(sock)[0].request_id for _ in range(count)] == list(range(1, count + 1))
    sending.result(PATIENCE_S)
    sock.close()


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(Untrusted) as caught:
        act()
    return str(caught.value)


def opened(daemon: Daemon, tls: Certificates | None, hello: Hello = HELLO) -> Channel:
    return Channel.open(daemon.address, hello, Deadline(PATIENCE_S), tls=tls)


def opened_async(daemon: Daemon, tls: Certificates | None) -> AsyncChannel:
    return asyncio.run(AsyncChannel.open(daemon.address, HELLO, Deadline(PATIENCE_S), tls=tls))


def test_who_is_not_let_in_reads_why_though_he_spoke_on(make: Callable[..., Daemon]) -> None:
    daemon = make(master())
    bare = certificates(replace(shared().client(), tls_cert="", tls_key=""))
    for _ in range(5):
        assert "requires a certificate: set tls_cert and tls_key" in refused(lambda: opened(daemon, bare))
    assert "requires a certificate" in refused(lambda: opened_async(daemon, bare))
    assert not daemon.handler.frames


def test_plain_and_tls_are_told_from_one_another_in_one_line(make: Callable[..., Daemon], caplog: pytest.LogCaptureFixture) -> None:
    encrypted, plain = make(master()), make(None)
    assert "this port requires TLS, and this side does not use it" in refused(lambda: opened(encrypted, None))
    assert "does not use it: set its tls_ca" in refused(lambda: opened_async(encrypted, None))
    assert "does not speak TLS: give it tls_cert and tls_key" in refused(lambda: opened(plain, client()))
    assert "does not speak TLS" in refused(lambda: opened_async(plain, client()))
    assert "the peer uses TLS and this port does not: set tls_cert and tls_key here" in caplog.text


def test_peer_must_match_its_certificate(make: Callable[..., Daemon]) -> None:
    daemon = make(master())
    with pytest.raises(Unauthorized, match="a client of tenant 'blue' introduces itself"):
        opened(daemon, client(), Hello(ROLE_CLIENT, "blue"))
    with pytest.raises(Unauthorized, match="node 'one' introduces itself"):
        opened(daemon, client(), Hello(ROLE_NODE, name="one"))
    channel = opened(daemon, client())
    with pytest.raises(Unauthorized, match="node 'one' introduces itself"):  # not later either
        channel.call(Hello(ROLE_NODE, name="one"), Welcome, Deadline(PATIENCE_S))
    channel.close()
    opened(daemon, certificates(shared().node("one")), Hello(ROLE_NODE, name="one")).close()
    liar = make(master(), server=SERVER_NODE, name="one")
    assert "kvstore://master, and node 'one' introduces itself" in refused(lambda: opened(liar, client()))
    assert "kvstore://master, and node 'one' introduces itself" in refused(lambda: opened_async(liar, client()))


def test_over_a_unix_socket_there_is_no_tls(tmp_path: Path) -> None:
    reactor = Reactor()
    handler = Recorder(on_frame=lambda session, header, _: session.reply(header.request_id, Welcome(1, "m")))
    server = Server(reactor, handler, ConnectionLimits(1), tls=master())
    path = server.listen_unix(tmp_path / "s.sock")
    running = in_background(reactor.run)
    channel = Channel.open(Address(unix=path), HELLO, Deadline(PATIENCE_S), tls=client())
    assert channel.certified is None
    channel.close()
    reactor.stop()
    running.result(PATIENCE_S)
    server.close()
    reactor.close()


@pytest.mark.promise("tls-everywhere")
def test_stalled_handshake_is_unauthenticated_and_times_out(make: Callable[..., Daemon]) -> None:
    daemon = make(master())
    with socket.create_connection((daemon.address.host, daemon.address.port)) as silent:
        opened(daemon, client()).close()
        clock = Clock()
        reactor = Reactor(clock)
        server = Server(reactor, Recorder(), ConnectionLimits(1, hello_timeout_s=1.0), tls=master())
        address = parse_address(server.listen_tcp("127.0.0.1", 0))
        place = address.host, address.port
        with socket.create_connection(place) as stranger:
            pump(reactor, lambda: bool(server.sessions))
            clock.now_ns += 2 * 10**9
            pump(reactor, lambda: not server.sessions)
            assert stranger.recv(1) == b""
            with socket.create_connection(place) as kept, socket.create_connection(place) as more:
                pump(reactor, lambda: bool(server.sessions))
                (session,) = server.sessions
                session._handler._mark_authenticated(session)  # type: ignore[attr-defined]  # as if it had said Hello
                more.settimeout(PATIENCE_S)
                for _ in range(20):
                    reactor.run_once(0)
                assert more.recv(1) == b""
                kept.close()
                pump(reactor, lambda: not server.sessions)
        server.close()
        reactor.close()
        assert silent.fileno() >= 0


def test_one_who_was_refused_and_goes_on_is_hung_up_on() -> None:
    reactor = Reactor()
    server = Server(reactor, Recorder(), ConnectionLimits(4), tls=master())
    address = parse_address(server.listen_tcp("127.0.0.1", 0))
    place = address.host, address.port
    with socket.create_connection(place) as talker, socket.create_connection(place) as quitter:
        talker.settimeout(PATIENCE_S)
        talker.sendall(b"plainly" * 10)
        quitter.sendall(b"plainly")
        quitter.shutdown(socket.SHUT_WR)
        pump(reactor, lambda: len(server.sessions) == 2)
        pump(reactor, lambda: len(server.sessions) == 1)
        assert read_frame(talker)[1] != Failure(0, "")
        talker.sendall(b"x" * MAX_REFUSED_BYTES)
        pump(reactor, lambda: not server.sessions)
    server.close()
    reactor.close()


def test_outgoing_session_shakes_hands_on_first_send(make: Callable[..., Daemon]) -> None:
    daemon = make(master())
    reactor, replies = Reactor(), Replies()
    sock = socket.create_connection((daemon.address.host, daemon.address.port))
    session = Session(reactor, client().begin_to(sock, "127.0.0.1", ("master",)), Recorder())
    value = b"v" * (3 * MIB)
    session.request(HELLO, replies, deadline_s=PATIENCE_S)
    pump(reactor, lambda: bool(replies.bodies))
    session._writer.send_message(put([value]), 9, 0, [memoryview(value)])
    pump(reactor, lambda: any(kind == Put.TYPE for kind, *_ in daemon.handler.frames))
    session.close()
    unmeant: list[KVStoreError] = []
    sock = socket.create_connection((daemon.address.host, daemon.address.port))
    session = Session(reactor, client().begin_to(sock, "127.0.0.1", ("node",)), Recorder())
    session.request(HELLO, lambda _, error: unmeant.append(error), deadline_s=PATIENCE_S)  # type: ignore[arg-type]
    pump(reactor, lambda: bool(unmeant))
    assert "is for kvstore://master, and kvstore://node/NAME is required" in str(unmeant[0])
    reactor.close()


def test_connecting_ends_with_what_the_caller_is_to_know() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(DeadlineExceeded):
            connect_to(address, client(), Deadline(0.05))
        silent.accept()[0].close()
        gone = in_background(lambda: silent.accept()[0].close())
        with pytest.raises(Unavailable, match=r"closed the connection in the TLS handshake|reset"):
            connect_to(address, client(), Deadline(PATIENCE_S))
        gone.result(PATIENCE_S)
        connect_to(address, None, Deadline(PATIENCE_S)).close()
    with pytest.raises(Unavailable, match="cannot connect to"):
        connect_to(address, client(), Deadline(PATIENCE_S))
    assert issubclass(ProtocolError, KVStoreError)
