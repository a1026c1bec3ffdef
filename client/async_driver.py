"""Carries out an asyncio client's operations, effect by effect, over its pool of asynchronous channels. Large work goes to a thread; of
several operations at once each has a task."""

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar, cast

from kvstore.client.connections.reservations import CLEANUP_S
from kvstore.client.core.effects import (
    AcquireConnectionEffect,
    AnyChannel,
    Effect,
    GatherEffect,
    Operation,
    ReadPayloadEffect,
    ReceiveEffect,
    RequestEffect,
    RequestFdsEffect,
    RunInThreadEffect,
    SendEffect,
    SendOneWayEffect,
    SleepEffect,
    SpawnEffect,
    TransferEffect,
)
from kvstore.client.operations import Operations
from kvstore.rpc.client.async_channel import AsyncChannel
from kvstore.rpc.client.async_connection_pool import AsyncPool
from kvstore.transfer.memory.signal_safety import Gate

INLINE_WORK_BYTES: Final = 256 << 10
"""Copies up to this size, some 30 us, cost less on the event loop than the way to a thread and back."""


async def carry_out(effect: RunInThreadEffect) -> Any:
    """Small work here, large work in a thread. A cancelled caller waits for it, and so does one that is dropped (its loop was stopped
    by a signal): the memory that the work uses is given back right after. Where no thread can be had the loop does it, as a blocking
    client's thread would."""
    if effect.size_bytes <= INLINE_WORK_BYTES:
        return effect.function()
    gate = Gate()
    results: list[Any] = []
    working: asyncio.Future[bool] | None = None
    try:
        with contextlib.suppress(RuntimeError):  # the system has none, or the executor takes nothing more
            working = asyncio.get_running_loop().run_in_executor(None, gate.run_inside, lambda: results.append(effect.function()))
        if working is not None:
            await _wait_for(working)
    finally:
        gate.close_and_wait()
    return results[0] if results else effect.function()


async def _wait_for(working: asyncio.Future[bool]) -> None:
    """To its end, also when cancelled, however often."""
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        raise


async def run_together(operations: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Their results, in order, each in a task of its own. The first error cancels the others, as being cancelled does all, and is raised
    once they have ended."""
    tasks = [asyncio.ensure_future(operation) for operation in operations]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()  # once: what it has to give back is not to be interrupted too
        while not all(task.done() for task in tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(tasks)
        errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if errors:
        raise errors[0]
    return [task.result() for task in tasks]


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
            case RequestEffect():
                return await _asynchronous(effect.channel).call(effect.message, effect.answer, effect.deadline, effect.payload)
            case SendEffect():
                return await _asynchronous(effect.channel).ask(effect.message, effect.deadline)
            case ReceiveEffect():
                return await _asynchronous(effect.channel).await_answer(effect.answer, effect.until)
            case AcquireConnectionEffect():
                return await self._pool.take(effect.address, effect.deadline, effect.hello)
            case ReadPayloadEffect():
                return await _asynchronous(effect.channel).read_into(effect.destinations, effect.deadline)
            case RunInThreadEffect():
                return await carry_out(effect)
            case TransferEffect():
                return await effect.engine.transfer_async(effect.copies, deadline_s=effect.deadline.left_s())
            case SendOneWayEffect():
                return await _asynchronous(effect.channel).post(effect.message)
            case RequestFdsEffect():
                return await _asynchronous(effect.channel).call_for_fds(effect.message, effect.deadline)
            case SleepEffect():
                return await asyncio.sleep(effect.seconds)
            case SpawnEffect():
                task = asyncio.create_task(self.run(effect.operation))
                self._aside.add(task)
                task.add_done_callback(self._aside.discard)
                return None
            case GatherEffect():
                return await run_together([self.run(operation) for operation in effect.operations])


def _asynchronous(channel: AnyChannel) -> AsyncChannel:
    return cast(AsyncChannel, channel)
