"""Open channels of one event loop, lent to its tasks. The bookkeeping is pool.py's."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from kvstore.protocol.errors import DeadlineExceeded
from kvstore.protocol.session_messages import Hello
from kvstore.rpc.address import Address
from kvstore.rpc.async_channel import AsyncChannel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.pool import Loan, Shelf, Turn, connect_deadline, connect_failed
from kvstore.rpc.vanishing import PEER_TIMEOUT_S
from kvstore.security.tls.certificates import Certificates


class AsyncPool:
    """Asynchronous channels for the tasks of one event loop, the only caller. A connection says `hello`, or what `take` is told."""

    def __init__(
        self,
        hello: Hello,
        *,
        max_channels: int,
        idle_ttl_s: float,
        connect_timeout_s: float,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        tls: Certificates | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._hello = hello
        self._tls = tls
        self._shelf: Shelf[AsyncChannel] = Shelf(max_channels=max_channels, idle_ttl_s=idle_ttl_s)
        self._connect_timeout_s = connect_timeout_s
        self._peer_timeout_s = peer_timeout_s
        self._clock_ns = clock_ns
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, address: Address, deadline: Deadline, hello: Hello | None = None) -> Loan[AsyncChannel]:
        """Lend a channel to `address`, opening one if none is idle; waits while `max_channels` are lent. A new one says `hello`, where
        that is given.

        Raises Unavailable, DeadlineExceeded, Closed, or the peer's refusal.
        """
        turn, channel = self._shelf.lend(address)
        while turn is None:
            await self._wait(deadline)
            turn, channel = self._shelf.lend(address)
        if channel is not None:
            return Loan(channel, partial(self._give_back, turn), reused=True)
        try:
            opened = await self._open(address, deadline, hello or self._hello)
            self._shelf.opened(opened, turn)
        except BaseException:
            self._shelf.not_opened(address, turn)
            self._wake()
            raise
        return Loan(opened, partial(self._give_back, turn), reused=False)

    async def _wait(self, deadline: Deadline) -> None:
        loop = asyncio.get_running_loop()
        given_back: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(deadline.left_s(), _wake, given_back)
        self._waiting.append(given_back)
        try:
            await given_back
        finally:
            timer.cancel()
            self._waiting.remove(given_back)

    async def _open(self, address: Address, deadline: Deadline, hello: Hello) -> AsyncChannel:
        try:
            attempt = connect_deadline(deadline, self._connect_timeout_s)
            return await AsyncChannel.open(address, hello, attempt, peer_timeout_s=self._peer_timeout_s, tls=self._tls)
        except DeadlineExceeded as error:
            raise connect_failed(error, address, deadline) from None

    def _give_back(self, turn: Turn, channel: AsyncChannel) -> None:
        self._shelf.give_back(channel, turn, self._clock_ns())
        self._wake()

    def _wake(self) -> None:
        """All of them: which address they wait for is not known, and a woken task may have been cancelled."""
        for waiting in self._waiting:
            _wake(waiting)

    def counts(self, address: Address) -> tuple[int, int]:
        """(lent, idle) channels to `address`."""
        return self._shelf.counts(address)

    def close(self) -> None:
        """Hang up on everyone; lent channels close when they come back, and `take` raises Closed. A second close is a no-op."""
        self._shelf.close()
        self._wake()


def _wake(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)
