"""The asyncio client against real daemons: the behaviour of both clients, then what only tasks can do."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from kvstore.client import AsyncClient
from kvstore.client.config import ClientSettings
from kvstore.protocol.errors import DeadlineExceeded
from tests.client.behaviour import ClientBehaviour, MakeClient, client, fresh_keys, running, where
from tests.client.processes import Cluster
from tests.client.scattered import ScatteredBehaviour
from tests.client.standing_by import one_hangs_and_the_other_is_elected

__all__ = ["client", "running", "where"]


class Blocking:
    """An AsyncClient whose loop runs in a thread, with its calls made blocking."""

    def __init__(self, client: AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(60)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **named: self._wait(getattr(self._client, name)(*args, **named))

    @property
    def settings(self) -> Any:
        return self._client.settings

    def stats(self) -> Any:
        return self._client.stats()

    def exists_here(self, keys: list[bytes]) -> Any:
        return self._client.exists_here(keys)

    def register(self, buffer: Any) -> Any:
        return self._client.register(buffer)

    @contextlib.contextmanager
    def view(self, key: bytes) -> Iterator[memoryview | None]:
        view = self._client.view(key)
        memory = self._wait(view.__aenter__())
        try:
            yield memory
        finally:
            self._wait(view.__aexit__(None, None, None))


@pytest.fixture
def make_client() -> MakeClient:
    @contextlib.contextmanager
    def make(*args: Any, **named: Any) -> Iterator[Blocking]:
        client = AsyncClient(*args, **named)
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            thread = threading.Thread(target=loop.run_forever)
            thread.start()
            blocking = Blocking(client, loop)
            try:
                yield blocking
            finally:
                blocking.close()
                loop.call_soon_threadsafe(loop.stop)
                thread.join()

    return make


class TestAsyncClient(ClientBehaviour):
    pass


class TestAsyncClientScattered(ScatteredBehaviour):
    pass


def test_tasks_share_a_client_and_more_of_them_than_connections(running: Cluster) -> None:
    async def main() -> None:
        keys = fresh_keys(200)
        async with AsyncClient(running.address) as client:
            assert all(await asyncio.gather(*(client.put(key, key * 5000) for key in keys)))
            assert await asyncio.gather(*(client.get(key) for key in keys)) == [key * 5000 for key in keys]
            async with client.view(keys[0]) as memory:
                assert memory is not None
                assert bytes(memory) == keys[0] * 5000

    asyncio.run(main())


@pytest.mark.parametrize("steps", range(12))
def test_a_call_cancelled_at_any_step_leaves_the_client_usable(running: Cluster, steps: int) -> None:
    async def main() -> None:
        [key] = fresh_keys(1)
        async with AsyncClient(running.address) as client:
            put = asyncio.create_task(client.put(key, b"x" * 1_000_000))
            for _ in range(steps):
                await asyncio.sleep(0)
            put.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await put
            with contextlib.suppress(DeadlineExceeded):  # the cancelled put's reservations are cancelled concurrently
                await client.put(key, b"y" * 1_000_000, deadline_s=0.05)
            assert await client.get(key) in (None, b"x" * 1_000_000, b"y" * 1_000_000)
            assert await client.put(fresh_keys(1)[0], b"z" * 100_000)

    asyncio.run(main())


@pytest.mark.promise("failover")
def test_request_to_a_hanging_owner_moves_to_the_new_one() -> None:
    settings = ClientSettings(owner_patience_s=0.5, use_index=False)

    async def ask(*masters: str) -> None:
        async with AsyncClient(masters, deadline_s=60, settings=settings) as client:
            for _ in range(2):
                assert await client.exists_batch([b"k"]) == [True]

    with one_hangs_and_the_other_is_elected() as (hanging, elected):
        asyncio.run(ask(hanging.address, elected.address))
        assert (len(hanging.asked), elected.hellos, len(elected.asked)) == (1, 3, 2)
