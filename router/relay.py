"""One request from its schedule to its last token: the master says where, one engine computes the prompt, another one makes the tokens.

It knows neither what clients send nor how; app.py does. Of one event loop.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

from kvstore.client.instances.client import Placement, Refusal
from kvstore.protocol.errors import Unavailable
from kvstore.router.answers import Piece
from kvstore.router.config import RouterSettings
from kvstore.router.counters import Counters
from kvstore.router.engines import DecodeStream, Engines, Work
from kvstore.router.tracing import step
from kvstore.scheduler.request import Slo

T = TypeVar("T")

GOES_ON: Final = (None, "length")
"""How a prefill's only token ends when more can follow."""


class Scheduler(Protocol):
    """What says where requests go: scheduling.py's, which asks the master."""

    async def schedule(self, keys: Sequence[bytes], *, input_tokens: int, output_tokens: int, slo: Slo) -> Placement | Refusal:
        """Raises Unavailable and others of the tree."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer whose first token is there. Close it, which hangs up on the engine that makes the others."""

    placement: Placement
    first: Piece
    stream: DecodeStream | None
    """What comes after; None: nothing does."""
    cached_tokens: int | None = None
    """As FirstToken has it."""

    async def pieces(self) -> AsyncGenerator[Piece]:
        """All of it; one of them has a finish_reason. Raises Unavailable, DeadlineExceeded: the decode engine fails."""
        yield self.first
        if self.stream is None:
            return
        finish_reason = self.first.finish_reason
        async for piece in self.stream:
            finish_reason = piece.finish_reason or finish_reason
            yield piece
        if finish_reason is None:
            raise Unavailable("the decode engine ended the answer without a reason")

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that is over."""

    placement: Placement
    pieces: list[Piece]
    cached_tokens: int | None = None
    """As FirstToken has it."""


class Relay:
    """Has requests served. What it needs is closed by whoever made it."""

    def __init__(self, scheduler: Scheduler, engines: Engines, settings: RouterSettings, counters: Counters) -> None:
        self._scheduler = scheduler
        self._engines = engines
        self._settings = settings
        self._counters = counters

    async def begin(self, work: Work, slo: Slo) -> Answer | Refusal:
        """Schedule and prefill, until the decode engine has accepted too; scheduled anew when an engine or the master fails.

        Raises Unavailable after `attempts`; DeadlineExceeded, which is not tried again: it took the client's time; InvalidArgument.
        Cancelled, it hangs up on the engines.
        """
        return await self._repeat(lambda: self._attempt(work, slo))

    async def complete(self, work: Work, slo: Slo) -> Whole | Refusal:
        """As `begin`, until the last token: a decode that breaks off is tried again too, since nobody has seen any of it."""

        async def attempt() -> Whole | Refusal:
            begun = await self._attempt(work, slo)
            if isinstance(begun, Refusal):
                return begun
            with contextlib.closing(begun):
                return Whole(begun.placement, [piece async for piece in begun.pieces()], begun.cached_tokens)

        return await self._repeat(attempt)

    async def _repeat(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The first outcome that is not Unavailable."""
        pause_s = self._settings.retry_pause_s
        for _ in range(self._settings.attempts - 1):
            with contextlib.suppress(Unavailable):
                return await attempt()
            self._counters.retries += 1
            await asyncio.sleep(pause_s)
            pause_s *= 2
        try:
            return await attempt()
        except Unavailable as error:
            raise Unavailable(f"not served in {self._settings.attempts} attempts; the last one: {error}") from None

    async def _attempt(self, work: Work, slo: Slo) -> Answer | Refusal:
        predicted = min(work.max_tokens, self._settings.predicted_output_tokens)
        with step("schedule"):
            placed = await self._scheduler.schedule(work.keys, input_tokens=len(work.tokens), output_tokens=predicted, slo=slo)
        if isinstance(placed, Refusal):
            return placed
        if placed.decode == placed.prefill:
            return await self._served(work, placed)
        first = await self._engines.prefill(work, placed)
        ends = first.piece.finish_reason
        if ends not in GOES_ON or len(first.token_ids) >= work.max_tokens:
            return Answer(placed, replace(first.piece, finish_reason=ends or "length"), None, first.cached_tokens)
        stream = await self._engines.decode(work, placed, first)
        return Answer(placed, replace(first.piece, finish_reason=None), stream, first.cached_tokens)

    async def _served(self, work: Work, placed: Placement) -> Answer:
        """By an engine that prefills and decodes: as soon as its first token is there."""
        stream = await self._engines.serve(work, placed)
        try:
            return Answer(placed, await stream.first(), stream)
        except BaseException:
            stream.close()
            raise
