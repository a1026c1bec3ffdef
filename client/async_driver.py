"""Carries out an asyncio client's operations, effect by effect, over its pool of asynchronous channels."""

import asyncio
import contextlib
from typing import Any, TypeVar, cast

from kvstore.client.async_work import carry_out, run_together
from kvstore.client.effects import (
    AnyChannel,
    Aside,
    Ask,
    AskForFds,
    Await,
    Effect,
    Fill,
    Later,
    Move,
    Operation,
    Post,
    Send,
    Sleep,
    Take,
    Together,
    Work,
)
from kvstore.client.operations import Operations
from kvstore.client.reservations import CLEANUP_S
from kvstore.rpc.async_channel import AsyncChannel
from kvstore.rpc.async_pool import AsyncPool

T = TypeVar("T")


class AsyncDriver:
    """Tasks of one event loop may share it."""

    def __init__(self, operations: Operations) -> None:
        """Does no I/O: channels are opened when effects want them."""
        self._reservations = operations.resources.reservations
        self._pool = AsyncPool(operations.hello, operations.settings, tls=operations.resources.tls)
        self._tidying: asyncio.Task[None] | None = None
        self._aside: set[asyncio.Task[None]] = set()
        """Operations that nobody waits for."""

    async def run(self, operation: Operation[T]) -> T:
        """Its result, or what it raises. A cancelled one ends when the copy under way has."""
        try:
            effect = next(operation)
            while True:
                try:
                    result = await self._do(effect)
                except BaseException as error:
                    effect = operation.throw(error)
                else:
                    effect = operation.send(result)
        except StopIteration as end:
            return cast(T, end.value)
        finally:
            try:
                operation.close()
            finally:
                if self._reservations.unused:
                    self._tidy()

    async def close(self) -> None:
        """Hang up. What a cancelled put had reserved is given back first, if a master answers soon."""
        if self._tidying is not None and not self._tidying.done():
            await asyncio.wait([self._tidying], timeout=CLEANUP_S)
        for task in list(self._aside):
            task.cancel()
        self._pool.close()

    def _tidy(self) -> None:
        """Give back what a cancelled put had reserved, in a task of its own: whoever cancelled it does not wait for daemons."""
        with contextlib.suppress(RuntimeError):  # the loop is gone: so are its connections
            if asyncio.get_running_loop() and (self._tidying is None or self._tidying.done()):
                self._tidying = asyncio.create_task(self.run(self._reservations.give_up_unused()))

    async def _do(self, effect: Effect) -> Any:
        match effect:
            case Ask():
                return await _asynchronous(effect.channel).call(effect.message, effect.answer, effect.deadline, effect.payload)
            case Send():
                return await _asynchronous(effect.channel).ask(effect.message, effect.deadline)
            case Await():
                return await _asynchronous(effect.channel).await_answer(effect.answer, effect.until)
            case Take():
                return await self._pool.take(effect.address, effect.deadline, effect.hello)
            case Fill():
                return await _asynchronous(effect.channel).read_into(effect.destinations, effect.deadline)
            case Work():
                return await carry_out(effect)
            case Move():
                return await effect.engine.transfer_async(effect.copies, deadline_s=effect.deadline.left_s())
            case Post():
                return await _asynchronous(effect.channel).post(effect.message)
            case AskForFds():
                return await _asynchronous(effect.channel).call_for_fds(effect.message, effect.deadline)
            case Sleep():
                return await asyncio.sleep(effect.seconds)
            case Later():
                asyncio.get_running_loop().run_in_executor(None, effect.function)
                return None
            case Aside():
                task = asyncio.create_task(self.run(effect.operation))
                self._aside.add(task)
                task.add_done_callback(self._aside.discard)
                return None
            case Together():
                return await run_together([self.run(operation) for operation in effect.operations])


def _asynchronous(channel: AnyChannel) -> AsyncChannel:
    return cast(AsyncChannel, channel)
