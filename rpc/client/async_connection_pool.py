"""Connection pool for the tasks of one event loop. pool_state.py has the bookkeeping."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from kvstore.protocol.errors import DeadlineExceeded, TooManyConnections, Unavailable
from kvstore.protocol.session_messages import Hello
from kvstore.rpc.address import Address
from kvstore.rpc.client.async_channel import AsyncChannel
from kvstore.rpc.client.connection_pool import ConnectionLease, PoolSettings, connect_deadline, connect_failed
from kvstore.rpc.client.pool_state import ChannelPermit, PoolState, Waiter
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.descriptors import max_open_files
from kvstore.security.tls.certificates import Certificates

MAX_OPENING: Final = 16
"""Connects to one address at a time. The loop runs them one after the other: of a thousand at once, most would reach
`connect_timeout_s`, and the first channels to open serve the other calls meanwhile."""

LOOP_DELAY_S: Final = 0.05
"""A connect that ends this long after its timeout was held up by its own event loop, and is repeated."""


class AsyncPool:
    """Pool of asynchronous channels, for the tasks of one event loop.

    New connections send `hello`, or that of `take`.
    """

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
        self._state: PoolState[AsyncChannel] = PoolState(
            max_channels=settings.max_channels,
            max_open=max_open_files() // 2,
            idle_ttl_s=settings.idle_ttl_s,
            max_opening=MAX_OPENING,
        )
        self._settings = settings
        self._clock_ns = clock_ns

    async def take(self, address: Address, deadline: Deadline, hello: Hello | None = None) -> ConnectionLease[AsyncChannel]:
        """Lease a channel to `address`, opening one if none is idle; waits in a queue while the limit is reached.

        A new channel sends `hello` if it is given. Raises Unavailable, DeadlineExceeded, Closed, or the peer's error.
        """
        while True:
            permit, channel = self._state.acquire(address)
            if permit is None:
                permit, channel = await self._wait(address, deadline)
            if channel is not None:
                return ConnectionLease(channel, partial(self._release, permit), reused=True)
            try:
                opened = await self._open(address, deadline, hello or self._hello)
                self._state.opened(opened, permit)
            except TooManyConnections:
                if not self._state.open_refused(address, permit, self._clock_ns()):
                    raise
            except BaseException as error:
                self._state.not_opened(address, permit, error if isinstance(error, Unavailable) else None)
                raise
            else:
                return ConnectionLease(opened, partial(self._release, permit), reused=False)

    async def _wait(self, address: Address, deadline: Deadline) -> tuple[ChannelPermit, AsyncChannel | None]:
        waiter = _TaskWaiter()
        try:
            while True:
                permit, channel = self._state.acquire_or_queue(address, waiter)
                if permit is not None:
                    return permit, channel
                await waiter.wait(deadline.left_s())
        finally:
            self._state.leave(address, waiter, self._clock_ns())

    async def _open(self, address: Address, deadline: Deadline, hello: Hello) -> AsyncChannel:
        while True:
            attempt = connect_deadline(deadline, self._settings.connect_timeout_s)
            try:
                return await AsyncChannel.open(address, hello, attempt, peer_timeout_s=self._settings.peer_timeout_s, tls=self._tls)
            except DeadlineExceeded as error:
                if attempt.waited_s() < attempt.timeout_s + LOOP_DELAY_S:
                    raise connect_failed(error, address, deadline) from None

    def _release(self, permit: ChannelPermit, channel: AsyncChannel) -> None:
        self._state.release(channel, permit, self._clock_ns())

    def counts(self, address: Address) -> tuple[int, int]:
        """Return the number of leased and of idle channels to `address`."""
        return self._state.counts(address)

    def close(self) -> None:
        """Close idle channels now and leased ones on release; `take` then raises Closed. A second close is a no-op."""
        self._state.close()


class _TaskWaiter(Waiter[AsyncChannel]):
    """A waiting task."""

    __slots__ = ("_is_woken",)

    def __init__(self) -> None:
        super().__init__()
        self._is_woken = asyncio.Event()

    def wake(self) -> None:
        self._is_woken.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait for `wake`, at most `timeout_s`."""
        timer = asyncio.get_running_loop().call_later(timeout_s, self._is_woken.set)
        try:
            await self._is_woken.wait()
        finally:
            timer.cancel()
        self._is_woken.clear()
