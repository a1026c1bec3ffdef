"""Connection pool of one event loop, which lends channels to its tasks. The bookkeeping is pool_state.py's."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from kvstore.protocol.errors import DeadlineExceeded, TooManyConnections
from kvstore.protocol.session_messages import Hello
from kvstore.rpc.address import Address
from kvstore.rpc.client.async_channel import AsyncChannel
from kvstore.rpc.client.connection_pool import ConnectionLease, PoolSettings, connect_deadline, connect_failed
from kvstore.rpc.client.pool_state import ChannelTurn, PoolState, Waiter
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.descriptors import max_open_files
from kvstore.security.tls.certificates import Certificates


class AsyncPool:
    """Asynchronous channels for the tasks of one event loop, the only caller. A connection says `hello`, or what `take` is told."""

    def __init__(
        self,
        hello: Hello,
        settings: PoolSettings,
        *,
        tls: Certificates | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._hello = hello
        self._tls = tls
        self._shelf: PoolState[AsyncChannel] = PoolState(
            max_channels=settings.max_channels, max_open=max_open_files() // 2, idle_ttl_s=settings.idle_ttl_s
        )
        self._settings = settings
        self._clock_ns = clock_ns

    async def take(self, address: Address, deadline: Deadline, hello: Hello | None = None) -> ConnectionLease[AsyncChannel]:
        """Lend a channel to `address`, opening one if none is idle; waits in turn while no more may be open. A new one says `hello`, where
        that is given.

        Raises Unavailable, DeadlineExceeded, Closed, or the peer's refusal.
        """
        while True:
            turn, channel = self._shelf.lend(address)
            if turn is None:
                turn, channel = await self._wait(address, deadline)
            if channel is not None:
                return ConnectionLease(channel, partial(self._give_back, turn), reused=True)
            try:
                opened = await self._open(address, deadline, hello or self._hello)
                self._shelf.opened(opened, turn)
            except TooManyConnections:
                if not self._shelf.exhausted(address, turn, self._clock_ns()):
                    raise
            except BaseException:
                self._shelf.not_opened(address, turn)
                raise
            else:
                return ConnectionLease(opened, partial(self._give_back, turn), reused=False)

    async def _wait(self, address: Address, deadline: Deadline) -> tuple[ChannelTurn, AsyncChannel | None]:
        waiter = _TaskWaiter()
        try:
            while True:
                turn, channel = self._shelf.lend_or_queue(address, waiter)
                if turn is not None:
                    return turn, channel
                await waiter.wait(deadline.left_s())
        finally:
            self._shelf.leave(address, waiter, self._clock_ns())

    async def _open(self, address: Address, deadline: Deadline, hello: Hello) -> AsyncChannel:
        try:
            attempt = connect_deadline(deadline, self._settings.connect_timeout_s)
            return await AsyncChannel.open(address, hello, attempt, peer_timeout_s=self._settings.peer_timeout_s, tls=self._tls)
        except DeadlineExceeded as error:
            raise connect_failed(error, address, deadline) from None

    def _give_back(self, turn: ChannelTurn, channel: AsyncChannel) -> None:
        self._shelf.give_back(channel, turn, self._clock_ns())

    def counts(self, address: Address) -> tuple[int, int]:
        """(lent, idle) channels to `address`."""
        return self._shelf.counts(address)

    def close(self) -> None:
        """Hang up on everyone; lent channels close when they come back, and `take` raises Closed. A second close is a no-op."""
        self._shelf.close()


class _TaskWaiter(Waiter[AsyncChannel]):
    """A task that waits."""

    __slots__ = ("_is_woken",)

    def __init__(self) -> None:
        super().__init__()
        self._is_woken = asyncio.Event()

    def wake(self) -> None:
        self._is_woken.set()

    async def wait(self, timeout_s: float) -> None:
        """Until it is woken, `timeout_s` at most."""
        timer = asyncio.get_running_loop().call_later(timeout_s, self._is_woken.set)
        try:
            await self._is_woken.wait()
        finally:
            timer.cancel()
        self._is_woken.clear()
