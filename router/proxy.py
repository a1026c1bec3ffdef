"""Streaming proxy: the master's scheduler chooses one or two engines for a request, and their response passes through.

Calls of the scheduler run in threads, because its client blocks. app.py owns the clients' connections. Runs in one event loop.
"""

import asyncio
import contextvars
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from kvstore.client.instances.client import Refusal, RequestPlacement, SchedulerClient
from kvstore.protocol.errors import Unavailable
from kvstore.router.config import RouterSettings
from kvstore.router.engines import EngineAnswer, EngineFailed, EngineRefused, Engines
from kvstore.router.metrics import RouterCounters
from kvstore.router.openai_api import ApiRequest
from kvstore.router.tokenizer import TokenizedPrompt
from kvstore.router.tracing import step
from kvstore.rpc.deadline import Deadline
from kvstore.scheduler.request import Slo

PREDICTED_OUTPUT_TOKENS: Final = 343
"""Expected length of a response, unless the client's limit is lower."""

MAX_RESPONSES: Final = 1 << 16
"""Responses whose engines are remembered: about 10 MB."""


class AsyncScheduler:
    """Scheduler client for one event loop. The caller closes client and threads."""

    def __init__(self, client: SchedulerClient, threads: Executor, *, block_tokens: int) -> None:
        self._client = client
        self._threads = threads
        self._block_tokens = block_tokens

    async def schedule(self, keys: Sequence[bytes], *, input_tokens: int, output_tokens: int, slo: Slo) -> RequestPlacement | Refusal:
        """As SchedulerClient.schedule, with a deadline of `deadline_s` that includes the wait for a thread.

        After cancellation the call continues in its thread, and the master's record of the request expires.
        """
        call = partial(
            self._client.schedule,
            keys,
            block_tokens=self._block_tokens,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            slo=slo,
            deadline=Deadline(self._client.settings.deadline_s),
        )
        context = contextvars.copy_context()  # has the request's trace
        return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, call)


class Scheduler(Protocol):
    """Interface of the scheduler; AsyncScheduler implements it by the master."""

    async def schedule(self, keys: Sequence[bytes], *, input_tokens: int, output_tokens: int, slo: Slo) -> RequestPlacement | Refusal:
        """Choose the engines of a request. Raises Unavailable and other KVStoreErrors."""
        ...


@dataclass(frozen=True, slots=True)
class ProxiedResponse:
    """A response that has begun. The caller closes `answer`, which ends the engine's request."""

    answer: EngineAnswer
    address: str
    """Of the engine that responds."""
    placement: RequestPlacement | None
    """None: not scheduled, because only one engine could serve the request."""
    prefill_cached_tokens: int | None = None
    """Cached tokens of the prompt, if a separate prefill engine computed it."""


class ResponseEngines:
    """Response id -> engine that keeps the response (`/v1/responses` with `store`). The oldest entries are dropped."""

    def __init__(self, limit: int = MAX_RESPONSES) -> None:
        self._limit = limit
        self._addresses: OrderedDict[str, str] = OrderedDict()

    def add(self, response_id: str, address: str) -> None:
        self._addresses[response_id] = address
        if len(self._addresses) > self._limit:
            self._addresses.popitem(last=False)

    def get(self, response_id: str) -> str | None:
        return self._addresses.get(response_id)


class StreamingProxy:
    """Schedules requests and sends them to engines, with retries. The caller closes scheduler and engines."""

    def __init__(self, scheduler: Scheduler, engines: Engines, settings: RouterSettings, counters: RouterCounters) -> None:
        self._scheduler = scheduler
        self._engines = engines
        self._settings = settings
        self._counters = counters

    async def begin(self, request: ApiRequest, prompt: TokenizedPrompt, slo: Slo) -> ProxiedResponse | Refusal:
        """Schedule a request and return when its response has begun; retried if an engine or the master fails before.

        After `attempts` the result is the last engine's error response, if it sent one; otherwise Unavailable is raised. Also raises
        DeadlineExceeded, without a retry because the client has waited long enough, and InvalidArgument. Cancellation ends the engines'
        requests.
        """
        pause_s = self._settings.retry_pause_s
        for _ in range(self._settings.attempts - 1):
            try:
                return await self._attempt(request, prompt, slo)
            except Unavailable:
                self._counters.retries += 1
            await asyncio.sleep(pause_s)
            pause_s *= 2
        try:
            return await self._attempt(request, prompt, slo)
        except EngineFailed as error:
            return ProxiedResponse(error.answer, "", None)
        except Unavailable as error:
            raise Unavailable(f"all {self._settings.attempts} attempts failed; the last one: {error}") from None

    async def ask(self, request: ApiRequest, address: str, *, path: str = "", method: str = "POST") -> ProxiedResponse:
        """Send a request to the only engine that can serve it. Raises as `begin`."""
        try:
            return ProxiedResponse(await self._engines.ask(address, request, path=path, method=method), address, None)
        except EngineFailed as error:
            return ProxiedResponse(error.answer, address, None)

    async def _attempt(self, request: ApiRequest, prompt: TokenizedPrompt, slo: Slo) -> ProxiedResponse | Refusal:
        usual = PREDICTED_OUTPUT_TOKENS
        predicted = min(request.max_output_tokens or usual, usual)
        with step("schedule"):
            placed = await self._scheduler.schedule(prompt.keys, input_tokens=prompt.tokens, output_tokens=predicted, slo=slo)
        if isinstance(placed, Refusal):
            return placed
        if placed.decode == placed.prefill or not request.is_splittable:
            return ProxiedResponse(await self._engines.serve(request, placed), placed.prefill_address, placed)
        try:
            prefilled = await self._engines.prefill(request, placed)
        except EngineRefused:  # send the client's own body, so that the engine's error refers to it
            return ProxiedResponse(await self._engines.serve(request, placed), placed.prefill_address, placed)
        answer = await self._engines.decode(request, placed, prefilled)
        return ProxiedResponse(answer, placed.decode_address, placed, prefilled.cached_tokens)
