"""Runs an asyncio client's operations, effect by effect, on a pool of asynchronous channels. Large work runs in
threads; gathered operations run as tasks."""

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
"""Copies up to this size, some 30 us, cost less on the event loop than a thread switch."""


async def carry_out(effect: RunInThreadEffect) -> Any:
    """Run small work here, large work in a thread.

    A cancelled caller waits for the work, because its memory is reused right after; so does one whose loop was stopped
    by a signal. Without a thread, the work runs on the loop.
    """
    if effect.size_bytes <= INLINE_WORK_BYTES:
        return effect.function()
    gate = Gate()
    results: list[Any] = []
    working: asyncio.Future[bool] | None = None
    try:
        with contextlib.suppress(RuntimeError):  # no thread available, or the executor is shut down
            working = asyncio.get_running_loop().run_in_executor(None, gate.run_inside, lambda: results.append(effect.function()))
        if working is not None:
            await _wait_for(working)
    finally:
        gate.close_and_wait()
    return results[0] if results else effect.function()


async def _wait_for(working: asyncio.Future[bool]) -> None:
    """Wait for the end, however often cancelled."""
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        raise


async def run_gathered(operations: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run the coroutines as tasks: their results, in order.

    The first error, or a cancellation, cancels the others; it is raised once all have ended.
    """
    tasks = [asyncio.ensure_future(operation) for operation in operations]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()  # once, so that its cleanup is not interrupted
        while not all(task.done() for task in tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(tasks)
        errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if errors:
        raise errors[0]
    return [task.result() for task in tasks]


T = TypeVar("T")


class AsyncDriver:
    """Runs operations of one AsyncClient. Tasks of one event loop may share it."""

    def __init__(self, operations: Operations) -> None:
        """Does no I/O: channels are opened by effects."""
        self._reservations = operations.resources.reservations
        self._pool = AsyncPool(operations.hello, operations.settings, tls=operations.resources.tls)
        self._cleanup: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        """Spawned operations."""

    async def run(self, operation: Operation[T]) -> T:
        """Run the operation: its result. A cancelled one ends after the copy in progress."""
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
                    self._start_cleanup()

    async def close(self) -> None:
        """Close all connections. Reservations of a cancelled put are cancelled first, if a master replies soon."""
        if self._cleanup is not None and not self._cleanup.done():
            await asyncio.wait([self._cleanup], timeout=CLEANUP_S)
        for task in list(self._background):
            task.cancel()
        self._pool.close()

    def _start_cleanup(self) -> None:
        """Cancel reservations of cancelled puts, in a task, so that the canceller does not wait for daemons."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the connections
            if asyncio.get_running_loop() and (self._cleanup is None or self._cleanup.done()):
                self._cleanup = asyncio.create_task(self.run(self._reservations.cancel_all_unused()))

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
                self._background.add(task)
                task.add_done_callback(self._background.discard)
                return None
            case GatherEffect():
                return await run_gathered([self.run(operation) for operation in effect.operations])


def _asynchronous(channel: AnyChannel) -> AsyncChannel:
    return cast(AsyncChannel, channel)
