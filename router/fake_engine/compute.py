"""Prefill and decode of a stand-in engine: each takes the time that the model would take on a GPU, and computes nothing.

A token is a function of all tokens before it, as with greedy decoding, and a small letter. So an answer is a function of the prompt alone,
whichever engines made it, and a test can predict it. Of one event loop; the model's times pass `speedup` times faster than the clock's.
"""

import asyncio
import itertools
import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import Corrupt, InvalidArgument, KVStoreError
from kvstore.router.fake_engine.blocks import BlockStore
from kvstore.scheduler.estimators.interface import DecodeTime, PrefillTime
from kvstore.scheduler.request import ScheduleRequest
from kvstore.scheduler.running_batch import RunningBatch

FIRST_LETTER: Final = ord("a")
LETTERS: Final = 26
_TOKEN: Final = struct.Struct("<i")
log = logging.getLogger("kvstore.router")
Clock = Callable[[], float]
"""Seconds, from any start."""
OnStep = Callable[[int, int, float], None]
"""Called with batch, context tokens and seconds of each step."""


def continuation(tokens: Sequence[int]) -> Iterator[int]:
    """The tokens that follow `tokens`, without end. A token's id is the letter's code."""
    hasher = xxhash.xxh3_64(struct.pack(f"<{len(tokens)}i", *tokens))
    while True:
        token = FIRST_LETTER + hasher.intdigest() % LETTERS
        hasher.update(_TOKEN.pack(token))
        yield token


def text_of(tokens: Sequence[int]) -> str:
    """What the tokens of `continuation` spell."""
    return "".join(map(chr, tokens))


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What became of a prompt."""

    prefix_tokens: int
    """That were not computed."""
    blocks: int
    """Full blocks of the prompt that are in the store now."""
    duration_s: float


class PrefillEngine:
    """Computes prompts one after the other, first come first served."""

    def __init__(
        self, model: PrefillTime, blocks: BlockStore, namespace: Namespace, *, speedup: float, clock: Clock = time.monotonic
    ) -> None:
        self._model = model
        self._clock = clock
        self._blocks = blocks
        self._namespace = namespace
        self._speedup = speedup
        self._turn = asyncio.Lock()
        self._waiting_s: list[float] = []
        """A time for each prompt that waits. Not their sum: one kept by adding and taking away would fall below 0."""
        self._ends_s = 0.0

    @property
    def queue_s(self) -> float:
        """Until it could start on something new. Any thread may ask."""
        return self.waiting_s + max(0.0, self._ends_s - self._clock()) * self._speedup

    @property
    def waiting_s(self) -> float:
        """Of the queue, what has not begun."""
        return sum(self._waiting_s)

    async def run(self, tokens: Sequence[int], *, prefix_blocks: int, on_queued: Callable[[], None]) -> PrefillResult:
        """Compute `tokens`, of which `prefix_blocks` blocks are said to be cached. `on_queued` is called once `queue_s` includes it.

        Raises Corrupt: a block in the store has wrong bytes. Cancelled, it leaves the queue.
        """
        request = ScheduleRequest(self._namespace.block_keys(tokens), len(tokens), self._namespace.block_tokens)
        keys = [key for key in request.keys if isinstance(key, bytes)]
        expected_s = self._model.prefill_s(len(tokens), request.prefix_tokens(prefix_blocks))
        self._waiting_s.append(expected_s)
        try:
            on_queued()
            await self._turn.acquire()
        finally:
            self._waiting_s.remove(expected_s)
        try:
            loaded = await load(self._blocks, keys[:prefix_blocks])
            prefix_tokens = request.prefix_tokens(loaded)
            duration_s = self._model.prefill_s(len(tokens), prefix_tokens)
            self._ends_s = self._clock() + duration_s / self._speedup
            await asyncio.sleep(duration_s / self._speedup)
        finally:
            self._ends_s = 0.0
            self._turn.release()
        return PrefillResult(prefix_tokens, await self._store(keys, loaded), duration_s)

    async def _store(self, keys: Sequence[bytes], first: int) -> int:
        """How many are in the store then: an engine goes on without."""
        try:
            await self._blocks.store(keys, first)
        except KVStoreError as error:
            log.warning("%d blocks are not stored: %s", len(keys) - first, error)
            return first
        return len(keys)


async def load(blocks: BlockStore, keys: Sequence[bytes]) -> int:
    """How many of these could be read; none when the store does not answer. Raises Corrupt."""
    try:
        return await blocks.load(keys)
    except Corrupt:
        raise
    except KVStoreError as error:
        log.warning("%d blocks are not read: %s", len(keys), error)
        return 0


@dataclass(eq=False, slots=True)
class DecodingSequence:
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
        self._waiting: deque[DecodingSequence] = deque()
        self._running: RunningBatch[DecodingSequence] = RunningBatch()
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

    def join(self, tokens: Sequence[int], count: int) -> DecodingSequence:
        """Have the `count` tokens that follow `tokens` made. The caller sees to `leave`. Raises InvalidArgument: it can never fit."""
        room_tokens = len(tokens) + count
        if self._capacity_tokens and room_tokens > self._capacity_tokens:
            raise InvalidArgument(f"{room_tokens} tokens do not fit: the cache holds {self._capacity_tokens}")
        sequence = DecodingSequence(list(itertools.islice(continuation(tokens), count)), len(tokens), room_tokens)
        self._waiting.append(sequence)
        self._steps = self._steps or asyncio.create_task(self._run())
        return sequence

    def leave(self, sequence: DecodingSequence) -> None:
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
