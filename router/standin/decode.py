"""What a stand-in decode engine does with sequences: a token for each of them at every step, which takes as long as a GPU would for so
many with so much cache. Of one event loop; times are the model's own, which pass `speedup` times faster than the clock's."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.protocol.errors import InvalidArgument
from kvstore.router.standin.tokens import continuation
from kvstore.scheduler.estimators.interface import DecodeTime

OnStep = Callable[[int, int, float], None]
"""Called with batch, context tokens and seconds of each step."""


@dataclass(eq=False, slots=True)
class Joined:
    """One sequence of an engine."""

    tokens: list[int]
    """Still to be made, first first: known beforehand, as they follow from the prompt."""
    context_tokens: int
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
        self._running: list[Joined] = []
        self._steps: asyncio.Task[None] | None = None

    @property
    def batch(self) -> int:
        """Sequences, those that wait included. Any thread may ask."""
        return len(self._waiting) + len(self._running)

    @property
    def context_tokens(self) -> int:
        """Of all of them. Any thread may ask."""
        return sum(sequence.context_tokens for sequence in [*self._waiting, *self._running])

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
        for line in (self._waiting, self._running):
            if sequence in line:
                line.remove(sequence)

    async def _run(self) -> None:
        """Steps until there is nothing left."""
        self._admit()
        while self._running:
            batch, context_tokens = len(self._running), sum(sequence.context_tokens for sequence in self._running)
            duration_s = self._model.tbt_s(batch, context_tokens)
            await asyncio.sleep(duration_s / self._speedup)
            self._on_step(batch, context_tokens, duration_s)
            for sequence in list(self._running):
                sequence.made.put_nowait(sequence.tokens.pop(0))
                sequence.context_tokens += 1
                if not sequence.tokens:
                    self._running.remove(sequence)
            self._admit()
        self._steps = None

    def _admit(self) -> None:
        """Those that fit, in order: a long one is not overtaken for ever."""
        taken = sum(sequence.room_tokens for sequence in self._running)
        while self._waiting and (not self._capacity_tokens or taken + self._waiting[0].room_tokens <= self._capacity_tokens):
            sequence = self._waiting.popleft()
            taken += sequence.room_tokens
            self._running.append(sequence)
