"""What a stand-in decode engine does with sequences: a token for each of them at every step, which takes as long as a GPU would for so
many with so much cache. Of one event loop; times are the model's own, which pass `speedup` times faster than the clock's."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.protocol.errors import InvalidArgument
from kvstore.router.standin.tokens import continuation
from kvstore.scheduler.batching import RunningBatch
from kvstore.scheduler.estimators.interface import DecodeTime

OnStep = Callable[[int, int, float], None]
"""Called with batch, context tokens and seconds of each step."""


@dataclass(eq=False, slots=True)
class Joined:
    """One sequence of an engine."""

    tokens: list[int]
    """Still to be made, first first: known beforehand, as they follow from the prompt."""
    prompt_tokens: int
    room_tokens: int
    """Of cache, when it ends."""
    made: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    """Tokens, as the steps make them."""


class DecodeEngine:
    """Sequences join the batch at the next step, when there is room for all that they will be; until then they wait in line."""

    def __init__(self, model: DecodeTime, *, speedup: float, capacity_tokens: int, on_step: OnStep) -> None:
        """`capacity_tokens` 0: no limit."""
        self._model = model
        self._speedup = speedup
        self._capacity_tokens = capacity_tokens
        self._on_step = on_step
        self._waiting: deque[Joined] = deque()
        self._running: RunningBatch[Joined] = RunningBatch()
        self._taken_tokens = 0
        """Of cache, by those that run."""
        self._steps: asyncio.Task[None] | None = None

    @property
    def batch(self) -> int:
        """Sequences, those that wait included. Any thread may ask."""
        return len(self._waiting) + len(self._running)

    @property
    def context_tokens(self) -> int:
        """Of all of them. Any thread may ask."""
        return self._running.context_tokens + sum(sequence.prompt_tokens for sequence in list(self._waiting))

    def join(self, tokens: Sequence[int], count: int) -> Joined:
        """Have the `count` tokens that follow `tokens` made. The caller sees to `leave`. Raises InvalidArgument: it can never fit."""
        room_tokens = len(tokens) + count
        if self._capacity_tokens and room_tokens > self._capacity_tokens:
            raise InvalidArgument(f"{room_tokens} tokens do not fit: the cache holds {self._capacity_tokens}")
        sequence = Joined(list(itertools.islice(continuation(tokens), count)), len(tokens), room_tokens)
        self._waiting.append(sequence)
        self._steps = self._steps or asyncio.create_task(self._run())
        return sequence

    def leave(self, sequence: Joined) -> None:
        """Its place is free, whether it is over or not."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running.members():
            self._running.leave(sequence)
            self._taken_tokens -= sequence.room_tokens

    async def _run(self) -> None:
        """Steps until there is nothing left."""
        self._admit()
        while len(self._running):
            batch, context_tokens = len(self._running), self._running.context_tokens
            duration_s = self._model.tbt_s(batch, context_tokens)
            await asyncio.sleep(duration_s / self._speedup)
            self._on_step(batch, context_tokens, duration_s)
            for sequence in self._running.members():
                sequence.made.put_nowait(sequence.tokens.pop(0))
            for sequence in self._running.advance():
                self._taken_tokens -= sequence.room_tokens
            self._admit()
        self._steps = None

    def _admit(self) -> None:
        """Those that fit, in order: a long one is not overtaken for ever."""
        while self._waiting and (not self._capacity_tokens or self._taken_tokens + self._waiting[0].room_tokens <= self._capacity_tokens):
            sequence = self._waiting.popleft()
            self._taken_tokens += sequence.room_tokens
            self._running.join(sequence, context_tokens=sequence.prompt_tokens, steps=len(sequence.tokens))
