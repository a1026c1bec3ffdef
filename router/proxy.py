"""Proxy between clients and engines: the master chooses the engines, one or two of them answer, and the bytes pass through.

The master's scheduler is asked in threads, for its client blocks. Clients and their connections are app.py's. Of one event loop.
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
"""Tokens that an answer is expected to have, or what was asked for if less."""

MAX_RESPONSES: Final = 1 << 16
"""Whose engines are remembered: about 10 MB."""


class AsyncScheduler:
    """Of one event loop. Client and threads are closed by whoever made them."""

    def __init__(self, client: SchedulerClient, threads: Executor, *, block_tokens: int) -> None:
        self._client = client
        self._threads = threads
        self._block_tokens = block_tokens

    async def schedule(self, keys: Sequence[bytes], *, input_tokens: int, output_tokens: int, slo: Slo) -> RequestPlacement | Refusal:
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


class Scheduler(Protocol):
    """Chooses the engines of a request. The implementation in scheduler.py requests that from the master."""

    async def schedule(self, keys: Sequence[bytes], *, input_tokens: int, output_tokens: int, slo: Slo) -> RequestPlacement | Refusal:
        """Raises Unavailable and others of the tree."""
        ...


@dataclass(frozen=True, slots=True)
class ProxiedResponse:
    """An answer that has begun. Close `answer`, which hangs up on the engine that makes it."""

    answer: EngineAnswer
    address: str
    """Of the engine that makes the answer."""
    placement: RequestPlacement | None
    """None: the request could go to one engine only, and was not scheduled."""
    prefill_cached_tokens: int | None = None
    """Of the prompt, not computed, where another engine than that of the answer computed it."""


class ResponseEngines:
    """The engines that keep responses (`/v1/responses` with `store`), by the responses' ids. The oldest are forgotten."""

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
    """Sends requests to engines. The caller closes the parts."""

    def __init__(self, scheduler: Scheduler, engines: Engines, settings: RouterSettings, counters: RouterCounters) -> None:
        self._scheduler = scheduler
        self._engines = engines
        self._settings = settings
        self._counters = counters

    async def begin(self, request: ApiRequest, prompt: TokenizedPrompt, slo: Slo) -> ProxiedResponse | Refusal:
        """Schedule a request and have its answer begun; scheduled again when an engine or the master fails before.

        After `attempts` the answer is the last engine's own failure, if an engine answered. Raises Unavailable otherwise;
        DeadlineExceeded, which is not tried again: it took the client's time; InvalidArgument. Cancelled, it hangs up on the engines.
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
            raise Unavailable(f"not served in {self._settings.attempts} attempts; the last one: {error}") from None

    async def ask(self, request: ApiRequest, address: str, *, path: str = "", method: str = "POST") -> ProxiedResponse:
        """Send a request to the one engine that can answer it. Raises as `begin`."""
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
        except EngineRefused:  # the refusal of the client's own body: an engine may cite it
            return ProxiedResponse(await self._engines.serve(request, placed), placed.prefill_address, placed)
        answer = await self._engines.decode(request, placed, prefilled)
        return ProxiedResponse(answer, placed.decode_address, placed, prefilled.cached_tokens)
