"""What an event loop does not do itself for a client: large work, which goes to a thread, and several operations at once, a task each."""

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from kvstore.client.effects import Work
from kvstore.transfer.memory.signal_safety import Gate

INLINE_WORK_BYTES: Final = 256 << 10
"""Copies up to this size, some 30 us, cost less on the event loop than the way to a thread and back."""


async def carry_out(effect: Work) -> Any:
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
            working = asyncio.get_running_loop().run_in_executor(None, gate.pass_through, lambda: results.append(effect.function()))
        if working is not None:
            await _wait_for(working)
    finally:
        gate.shut()
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
