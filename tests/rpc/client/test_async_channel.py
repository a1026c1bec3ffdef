"""The asyncio channel against a real daemon, and against peers that misbehave."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol.errors import DeadlineExceeded, ProtocolError, Unauthorized, Unavailable
from kvstore.protocol.frames import HEADER_BYTES, FrameHeader, pack_header
from kvstore.protocol.master_messages import Nodes
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import MapSlabs, Put, ReleaseLeases
from kvstore.protocol.session_messages import Count, Failure, Flags, Hello, Ok, Welcome
from kvstore.rpc.address import Address
from kvstore.rpc.client.async_channel import AsyncChannel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.server.session import Session
from tests.ports import free_ports
from tests.rpc.daemon_child import Daemon, running
from tests.rpc.unanswering import black_hole, has_addresses

Started = tuple[Daemon, Address, Address]
BIG = os.urandom(3 << 20)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Started]:
    with running(tmp_path) as started:
        yield started


def with_channel(address: Address, scenario: Callable[[AsyncChannel], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        channel = await AsyncChannel.open(address, Hello(1), Deadline(5))
        try:
            await scenario(channel)
        finally:
            channel.close()

    asyncio.run(main())


def with_peer(answer: Sequence[bytes], scenario: Callable[[AsyncChannel], Coroutine[Any, Any, None]]) -> None:
    """A channel whose peer has sent these bytes and closed the connection."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.sendall(b"".join(answer))
        theirs.shutdown(socket.SHUT_WR)
        channel = AsyncChannel(Address(unix="/pair"), ours)
        await scenario(channel)
        channel.close()
        theirs.close()

    asyncio.run(main())


def with_pair(scenario: Callable[[AsyncChannel, socket.socket], Coroutine[Any, Any, None]]) -> None:
    """A channel, and its peer's end of the socket."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, contextlib.closing(AsyncChannel(Address(unix="/pair"), ours)) as channel:
            await scenario(channel, theirs)

    asyncio.run(main())


def frame(message: Message, request_id: int = 1, payload_bytes: int = 0) -> bytes:
    body = message.pack()
    return pack_header(message.TYPE, request_id, len(body), payload_bytes) + body


def values(*parts: bytes) -> Callable[[Session, FrameHeader, Message], None]:
    return lambda session, header, message: session.reply(header.request_id, Ok(), parts)


@pytest.mark.parametrize("unix", [False, True])
def test_large_payloads_go_both_ways_over_tcp_and_unix(daemon: Started, unix: bool) -> None:
    daemon[0].on_nodes = values(BIG, b"tail", b"x" * 1000)

    async def scenario(channel: AsyncChannel) -> None:
        put = Put("", [b"k"], [len(BIG)], [1], [1], [b""])
        assert await channel.call(put, Count, Deadline(5), [memoryview(BIG)]) == Count(len(BIG))
        await channel.call(Nodes(), Ok, Deadline(5))
        big, tail, rest = bytearray(len(BIG)), bytearray(4), bytearray(1000)
        await channel.read_into([memoryview(big), memoryview(tail)], Deadline(5))
        await channel.read_into([memoryview(rest)], Deadline(5))
        assert bytes(big + tail + rest) == BIG + b"tail" + b"x" * 1000
        assert await channel.call(put, Count, Deadline(5), [memoryview(BIG)]) == Count(len(BIG))

    with_channel(daemon[2] if unix else daemon[1], scenario)
    assert daemon[0].received == BIG


def test_descriptors_come_along_and_are_the_callers(daemon: Started) -> None:
    async def scenario(channel: AsyncChannel) -> None:
        answer, fds = await channel.call_for_fds(MapSlabs([1, 0, 2]), Deadline(5))
        assert list(answer.sizes) == [4096, 0, 4096]
        assert len(fds) == 2
        for fd in fds:
            os.close(fd)

    with_channel(daemon[2], scenario)


def test_no_answer_in_time_closes_the_channel(daemon: Started) -> None:
    daemon[0].on_nodes = lambda session, header, message: None

    async def scenario(channel: AsyncChannel) -> None:
        with pytest.raises(DeadlineExceeded):
            await channel.call(Nodes(), Ok, Deadline(0.2))
        assert not channel.is_open

    with_channel(daemon[1], scenario)


def test_a_cancelled_call_closes_the_channel(daemon: Started) -> None:
    daemon[0].on_nodes = lambda session, header, message: None

    async def scenario(channel: AsyncChannel) -> None:
        call = asyncio.create_task(channel.call(Nodes(), Ok, Deadline(5)))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not channel.is_open

    with_channel(daemon[1], scenario)


def test_a_cancellation_wins_over_an_answer_that_comes_with_it() -> None:
    async def scenario(channel: AsyncChannel, theirs: socket.socket) -> None:
        call = asyncio.create_task(channel.call(Nodes(), Ok, Deadline(5)))
        await asyncio.sleep(0)
        theirs.sendall(frame(Ok()))
        await asyncio.sleep(0)  # the loop has seen the answer, and serves it after this
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not channel.is_open

    with_pair(scenario)


def test_an_answer_that_is_there_when_the_deadline_ends_is_taken() -> None:
    async def scenario(channel: AsyncChannel, theirs: socket.socket) -> None:
        deadline = Deadline(0.2)
        call = asyncio.create_task(channel.call(Nodes(), Ok, deadline))
        await asyncio.sleep(0)
        theirs.sendall(frame(Ok()))
        with contextlib.suppress(DeadlineExceeded):
            while True:  # so that the loop finds both at once
                deadline.left_s()
        assert await call == Ok()

    with_pair(scenario)


def test_descriptors_that_do_not_come_in_time_close_the_channel() -> None:
    async def scenario(channel: AsyncChannel, theirs: socket.socket) -> None:
        with pytest.raises(DeadlineExceeded):
            await channel.call_for_fds(MapSlabs([1]), Deadline(0.2))
        assert not channel.is_open

    with_pair(scenario)


def test_a_refused_hello_is_passed_on(daemon: Started) -> None:
    daemon[0].refusal = Unauthorized("no")
    with pytest.raises(Unauthorized):
        asyncio.run(AsyncChannel.open(daemon[1], Hello(1), Deadline(5)))


@pytest.mark.parametrize("unix", [True, False])
def test_nobody_there_is_unavailable(tmp_path: Path, unix: bool) -> None:
    address = Address(unix=str(tmp_path / "none")) if unix else Address("127.0.0.1", free_ports(1)[0])
    with pytest.raises(Unavailable, match="cannot connect"):
        asyncio.run(AsyncChannel.open(address, Hello(1), Deadline(5)))


def test_async_connect_leaves_time_for_other_addresses(daemon: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        channel = await AsyncChannel.open(Address("host", 1), Hello(1), Deadline(4))
        assert await channel.call(Nodes(), Ok, Deadline(5)) == Ok()
        channel.close()

    with black_hole() as silent:
        has_addresses(monkeypatch, silent, (daemon[1].host, daemon[1].port))
        asyncio.run(main())


def test_a_connect_that_takes_too_long_is_exceeded() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()), pytest.raises(DeadlineExceeded):
            asyncio.run(AsyncChannel.open(Address(*full.getsockname()), Hello(1), Deadline(0.05)))


GARBAGE = [
    b"x" * HEADER_BYTES,
    frame(Flags(b"\1")),
    frame(Ok(), request_id=9),
    pack_header(Ok.TYPE, 1, 3) + b"abc",
    pack_header(Failure.TYPE, 1, 1) + b"a",
    frame(Failure(103, "of another request"), request_id=9),
]


def test_async_descriptors_are_closed_after_a_failed_answer() -> None:
    async def hung_up(channel: AsyncChannel) -> None:
        with pytest.raises(Unavailable):
            await channel.call_for_fds(MapSlabs([1]), Deadline(5))

    with_peer([], hung_up)

    async def scenario(channel: AsyncChannel, theirs: socket.socket) -> None:
        fd = os.memfd_create("slab")
        socket.send_fds(theirs, [frame(Welcome(1, "x"))], [fd])
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ProtocolError):
            await channel.call_for_fds(MapSlabs([1]), Deadline(5))
        assert len(os.listdir("/proc/self/fd")) == before - 1  # the channel's own
        os.close(fd)

    with_pair(scenario)


def test_a_cancelled_post_closes_the_channel() -> None:
    async def scenario(channel: AsyncChannel, theirs: socket.socket) -> None:
        channel._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        post = asyncio.create_task(channel.post(ReleaseLeases([1] * 60_000)))
        await asyncio.sleep(0)
        post.cancel()
        with pytest.raises(asyncio.CancelledError):
            await post
        assert not channel.is_open

    with_pair(scenario)


def test_an_answer_may_be_awaited_further() -> None:
    async def scenario(channel: AsyncChannel, theirs: socket.socket) -> None:
        await channel.ask(Nodes(), Deadline(10))
        assert await channel.await_answer(Ok, Deadline(0.001)) is None
        theirs.sendall(frame(Ok())[:-1])
        assert await channel.await_answer(Ok, Deadline(0.001)) is None
        assert channel.is_open
        assert not channel.is_settled
        theirs.sendall(frame(Ok())[-1:])
        assert await channel.await_answer(Ok, Deadline(10)) == Ok()
        assert channel.is_settled
        await channel.ask(Nodes(), Deadline(10))
        theirs.close()
        with pytest.raises(Unavailable):
            await channel.await_answer(Ok, Deadline(10))
        assert not channel.is_open
        channel.close()

    with_pair(scenario)
