"""The master's scheduler, asked from an event loop: each question is a blocking call in one of a few threads."""

import asyncio
import contextvars
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

from kvstore.client.instances.client import Placement, Refusal, SchedulerClient
from kvstore.rpc.deadline import Deadline
from kvstore.scheduler.request import Slo


class AsyncScheduler:
    """Of one event loop. Client and threads are closed by whoever made them."""

    def __init__(self, client: SchedulerClient, threads: Executor, *, block_tokens: int) -> None:
        self._client = client
        self._threads = threads
        self._block_tokens = block_tokens

    async def schedule(self, keys: Sequence[bytes], *, input_tokens: int, output_tokens: int, slo: Slo) -> Placement | Refusal:
        """As SchedulerClient.schedule, within its `deadline_s` from now on: to wait for a thread counts too. Cancelled, the question goes
        on in its thread, and the master forgets the request in time."""
        ask = partial(
            self._client.schedule,
            keys,
            block_tokens=self._block_tokens,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            slo=slo,
            deadline=Deadline(self._client.settings.deadline_s),
        )
        here = contextvars.copy_context()  # the trace of the request
        return await asyncio.get_running_loop().run_in_executor(self._threads, here.run, ask)
