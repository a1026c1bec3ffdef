"""Open channels of one event loop, lent to its tasks. The bookkeeping is pool.py's."""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from itertools import islice

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
        self._waiting: defaultdict[Address, deque[asyncio.Event]] = defaultdict(deque)
        """An event for each taker that waits, first come first: its turn may have come."""

    async def take(self, address: Address, deadline: Deadline, hello: Hello | None = None) -> Loan[AsyncChannel]:
        """Lend a channel to `address`, opening one if none is idle; waits while `max_channels` are lent. A new one says `hello`, where
        that is given.

        Raises Unavailable, DeadlineExceeded, Closed, or the peer's refusal.
        """
        turn, channel = self._shelf.lend(address)
        if turn is None:
            turn, channel = await self._wait(address, deadline)
        if channel is not None:
            return Loan(channel, partial(self._give_back, turn), reused=True)
        try:
            opened = await self._open(address, deadline, hello or self._hello)
            self._shelf.opened(opened, turn)
        except BaseException:
            self._shelf.not_opened(address, turn)
            self._wake(address)
            raise
        return Loan(opened, partial(self._give_back, turn), reused=False)

    async def _wait(self, address: Address, deadline: Deadline) -> tuple[Turn, AsyncChannel | None]:
        loop, queue, given_back = asyncio.get_running_loop(), self._waiting[address], asyncio.Event()
        queue.append(given_back)
        try:
            while True:
                timer = loop.call_later(deadline.left_s(), given_back.set)
                try:
                    await given_back.wait()
                finally:
                    timer.cancel()
                turn, channel = self._shelf.lend(address)
                if turn is not None:
                    return turn, channel
                given_back.clear()  # overtaken, or out of time
        finally:
            queue.remove(given_back)
            self._wake(address)  # whose turn it is if this one was woken and does not go on

    async def _open(self, address: Address, deadline: Deadline, hello: Hello) -> AsyncChannel:
        try:
            attempt = connect_deadline(deadline, self._connect_timeout_s)
            return await AsyncChannel.open(address, hello, attempt, peer_timeout_s=self._peer_timeout_s, tls=self._tls)
        except DeadlineExceeded as error:
            raise connect_failed(error, address, deadline) from None

    def _give_back(self, turn: Turn, channel: AsyncChannel) -> None:
        self._shelf.give_back(channel, turn, self._clock_ns())
        self._wake(channel.address)

    def _wake(self, address: Address) -> None:
        """As many of those who wait for `address` as have a place there, and no others: a thousand of them, each woken at every return,
        would leave the loop no time for anything else."""
        queue = self._waiting.get(address)
        if queue:
            for given_back in islice(queue, self._shelf.free(address)):
                given_back.set()

    def counts(self, address: Address) -> tuple[int, int]:
        """(lent, idle) channels to `address`."""
        return self._shelf.counts(address)

    def close(self) -> None:
        """Hang up on everyone; lent channels close when they come back, and `take` raises Closed. A second close is a no-op."""
        self._shelf.close()
        for queue in self._waiting.values():
            for given_back in queue:
                given_back.set()
