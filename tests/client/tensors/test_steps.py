"""Promises of steps.py: threads and event loops carry out the same steps, and end them whatever happens."""

import asyncio
from collections.abc import Awaitable
from typing import Any, cast

import pytest

from kvstore.client.aio import AsyncClient
from kvstore.client.core.effects import Work
from kvstore.client.sync import Client
from kvstore.client.tensors.steps import Call, Steps, run, run_async


class Scene:
    """Steps that note when they end."""

    def __init__(self, *, fails: bool = False) -> None:
        self.has_ended = False
        self._fails = fails

    def steps(self) -> Steps[int]:
        try:
            asked = yield Call(lambda client: client(20))
            worked = yield Work(lambda: asked // (0 if self._fails else 2), 0)
            return int(worked) + 1
        finally:
            self.has_ended = True


def test_steps_end_with_the_error_of_one_of_them() -> None:
    scene = Scene(fails=True)
    with pytest.raises(ZeroDivisionError):
        run(scene.steps(), cast(Client, lambda number: number))
    assert scene.has_ended

    async def ask(number: int) -> int:
        return number

    other = Scene(fails=True)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_async(other.steps(), cast(AsyncClient, ask)))
    assert other.has_ended


def test_steps_end_when_their_task_is_cancelled() -> None:
    scene = Scene()

    async def cancelled() -> None:
        asked = asyncio.Event()

        async def ask(_: int) -> Any:
            asked.set()
            await asyncio.Event().wait()

        task = asyncio.ensure_future(cast(Awaitable[int], run_async(scene.steps(), cast(AsyncClient, ask))))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert scene.has_ended
