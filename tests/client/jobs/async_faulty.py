"""An AsyncClient of a real cluster, before whose calls a test can put a fault: an error, or a wait."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvstore.client.aio import AsyncClient
from kvstore.client.holds import Hold
from kvstore.client.views import AsyncView
from kvstore.protocol.errors import KVStoreError

AsyncFault = Callable[[], Awaitable[None]]


def raises(error: BaseException) -> AsyncFault:
    async def fault() -> None:
        raise error

    return fault


class AsyncBarrier:
    """A fault that holds calls until they are let go."""

    def __init__(self) -> None:
        self.is_reached = asyncio.Event()
        self._is_open = asyncio.Event()

    async def __call__(self) -> None:
        self.is_reached.set()
        async with asyncio.timeout(60):
            await self._is_open.wait()

    def open(self) -> None:
        self._is_open.set()


class AsyncFaultyClient(AsyncClient):
    """`calls` names all that were made, and their keys."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.faults: deque[AsyncFault] = deque()
        """For the next calls, one each; calls after them are sound."""
        self.calls: list[tuple[str, list[bytes]]] = []

    async def _before(self, name: str, keys: Sequence[bytes], deadline_s: float | None) -> None:
        self.calls.append((name, list(keys)))
        assert deadline_s is not None
        if self.faults:
            await self.faults.popleft()()

    async def exists_batch(self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None) -> list[bool]:
        await self._before("exists", keys, deadline_s)
        return await super().exists_batch(keys, hold=hold, deadline_s=deadline_s)

    async def match_prefix(self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None) -> int:
        await self._before("match", keys, deadline_s)
        return await super().match_prefix(keys, hold=hold, deadline_s=deadline_s)

    async def get_each_into(
        self, keys: Sequence[bytes], buffers: Sequence[Any], *, deadline_s: float | None = None
    ) -> list[int | KVStoreError | None]:
        await self._before("get", keys, deadline_s)
        return await super().get_each_into(keys, buffers, deadline_s=deadline_s)

    async def put_batch_from(
        self, keys: Sequence[bytes], values: Sequence[Any], *, deadline_s: float | None = None, **more: Any
    ) -> list[bool | KVStoreError]:
        await self._before("put", keys, deadline_s)
        return await super().put_batch_from(keys, values, deadline_s=deadline_s, **more)

    def view(self, key: bytes, *, deadline_s: float | None = None) -> AsyncView:
        self.calls.append(("view", [key]))
        return super().view(key, deadline_s=deadline_s)
