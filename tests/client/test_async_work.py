"""Work of async_driver.py: its thread, and the wait of a cancelled caller for it."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.client.async_driver import INLINE_WORK_BYTES, carry_out, run_gathered
from kvstore.client.core.effects import RunInThreadEffect
from kvstore.protocol.errors import DeadlineExceeded


def test_a_cancelled_call_waits_for_the_copy_under_way() -> None:
    """Else the copy would go on in memory that is already someone else's."""

    async def main() -> None:
        may_end, has_ended = threading.Event(), threading.Event()

        def copy() -> None:
            may_end.wait(10)
            has_ended.set()

        working = asyncio.create_task(carry_out(RunInThreadEffect(copy, INLINE_WORK_BYTES + 1)))
        for _ in range(3):
            await asyncio.sleep(0)
            working.cancel()
        assert not working.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert has_ended.is_set()

    asyncio.run(main())


def test_large_work_is_done_at_once_where_no_thread_can_be_had() -> None:
    async def main() -> None:
        executor = ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(executor)
        executor.shutdown()
        assert await carry_out(RunInThreadEffect(threading.get_ident, INLINE_WORK_BYTES + 1)) == threading.get_ident()

    asyncio.run(main())


def test_run_gathered_ends_all_on_error_or_cancel() -> None:
    """However often it is cancelled while they end."""
    ended: list[str] = []

    async def waits(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append(name)

    async def fails() -> None:
        raise DeadlineExceeded("too slow")

    async def gives(result: int) -> int:
        return result

    async def main() -> None:
        assert await run_gathered([gives(1), gives(2)]) == [1, 2]
        with pytest.raises(DeadlineExceeded):
            await run_gathered([waits("one"), fails()])
        assert ended == ["one"]
        both = asyncio.ensure_future(run_gathered([waits("two"), waits("three")]))
        for _ in range(3):  # until they wait
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
            both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both
        assert ended == ["one", "two", "three"]

    asyncio.run(main())
