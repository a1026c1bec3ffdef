"""Prefill and decode of a fake engine: each takes the time of the model on a GPU, and computes nothing.

A token is a lower-case letter that depends on all tokens before it, as in greedy decoding. So the output depends on the prompt alone, not
on the engines, and tests can predict it. Runs in one event loop; the model's time passes `speedup` times faster than the clock's.
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
"""Returns monotonic seconds."""
OnStep = Callable[[int, int, float], None]
"""Called after each step with its batch, context tokens and seconds."""


def continuation(tokens: Sequence[int]) -> Iterator[int]:
    """Generate the tokens that follow `tokens`, without end. A token's id is the letter's code."""
    hasher = xxhash.xxh3_64(struct.pack(f"<{len(tokens)}i", *tokens))
    while True:
        token = FIRST_LETTER + hasher.intdigest() % LETTERS
        hasher.update(_TOKEN.pack(token))
        yield token


def text_of(tokens: Sequence[int]) -> str:
    """Decode tokens of `continuation`."""
    return "".join(map(chr, tokens))


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Result of a prefill."""

    prefix_tokens: int
    """Tokens that were loaded, not computed."""
    blocks: int
    """Full blocks of the prompt in the store."""
    duration_s: float


class PrefillEngine:
    """Computes prompts one after the other, in order of arrival."""

    def __init__(
        self, model: PrefillTime, blocks: BlockStore, namespace: Namespace, *, speedup: float, clock: Clock = time.monotonic
    ) -> None:
        self._model = model
        self._clock = clock
        self._blocks = blocks
        self._namespace = namespace
        self._speedup = speedup
        self._gpu = asyncio.Lock()
        self._waiting_s: list[float] = []
        """Expected time of each waiting prompt. Not a running sum: rounding errors would make it negative."""
        self._ends_s = 0.0

    @property
    def queue_s(self) -> float:
        """Time until a new prompt would start. Thread-safe."""
        return self.waiting_s + max(0.0, self._ends_s - self._clock()) * self._speedup

    @property
    def waiting_s(self) -> float:
        """Expected time of the waiting prompts."""
        return sum(self._waiting_s)

    async def run(self, tokens: Sequence[int], *, prefix_blocks: int, on_queued: Callable[[], None]) -> PrefillResult:
        """Compute `tokens`, of which `prefix_blocks` blocks should be cached. Calls `on_queued` once `queue_s` includes the prompt.

        Raises Corrupt if a block in the store has wrong bytes. Cancellation removes the prompt from the queue.
        """
        request = ScheduleRequest(self._namespace.block_keys(tokens), len(tokens), self._namespace.block_tokens)
        keys = [key for key in request.keys if isinstance(key, bytes)]
        expected_s = self._model.prefill_s(len(tokens), request.prefix_tokens(prefix_blocks))
        self._waiting_s.append(expected_s)
        try:
            on_queued()
            await self._gpu.acquire()
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
            self._gpu.release()
        return PrefillResult(prefix_tokens, await self._store(keys, loaded), duration_s)

    async def _store(self, keys: Sequence[bytes], first: int) -> int:
        """Put the blocks, and return how many the store has. A failure is logged: the engine continues without the store."""
        try:
            await self._blocks.store(keys, first)
        except KVStoreError as error:
            log.warning("storing %d blocks failed: %s", len(keys) - first, error)
            return first
        return len(keys)


async def load(blocks: BlockStore, keys: Sequence[bytes]) -> int:
    """Load blocks and return how many were read; 0 if the store fails. Raises Corrupt."""
    try:
        return await blocks.load(keys)
    except Corrupt:
        raise
    except KVStoreError as error:
        log.warning("reading %d blocks failed: %s", len(keys), error)
        return 0


@dataclass(eq=False, slots=True)
class DecodingSequence:
    """One sequence in a decode engine."""

    tokens: list[int]
    """Tokens still to be produced, in order; known in advance, because they depend on the prompt alone."""
    prompt_tokens: int
    reserved: int
    """Tokens of cache that the sequence takes at its end."""
    made: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    """Tokens produced by the steps so far."""


class DecodeEngine:
    """Continuous batching: a sequence joins the batch at the next step if the cache can hold it to its end; until then it waits."""

    def __init__(self, model: DecodeTime, *, speedup: float, capacity_tokens: int, on_step: OnStep) -> None:
        """`capacity_tokens` 0: no limit."""
        self._model = model
        self._speedup = speedup
        self._capacity_tokens = capacity_tokens
        self._on_step = on_step
        self._waiting: deque[DecodingSequence] = deque()
        self._running: RunningBatch[DecodingSequence] = RunningBatch()
        self._used_tokens = 0
        """Cache reserved by the running sequences."""
        self._steps: asyncio.Task[None] | None = None

    @property
    def batch(self) -> int:
        """Number of sequences, waiting ones included. Thread-safe."""
        return len(self._waiting) + len(self._running)

    @property
    def context_tokens(self) -> int:
        """Context of all sequences. Thread-safe."""
        return self._running.context_tokens + sum(sequence.prompt_tokens for sequence in list(self._waiting))

    def join(self, tokens: Sequence[int], count: int) -> DecodingSequence:
        """Add a sequence that produces the `count` tokens after `tokens`. The caller calls `leave`.

        Raises InvalidArgument if it exceeds the cache.
        """
        reserved = len(tokens) + count
        if self._capacity_tokens and reserved > self._capacity_tokens:
            raise InvalidArgument(f"{reserved} tokens do not fit: the cache holds {self._capacity_tokens}")
        sequence = DecodingSequence(list(itertools.islice(continuation(tokens), count)), len(tokens), reserved)
        self._waiting.append(sequence)
        self._steps = self._steps or asyncio.create_task(self._run())
        return sequence

    def leave(self, sequence: DecodingSequence) -> None:
        """Remove a sequence, finished or not."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running.members():
            self._running.leave(sequence)
            self._used_tokens -= sequence.reserved

    async def _run(self) -> None:
        """Run steps until no sequence is left."""
        self._admit()
        while len(self._running):
            batch, context_tokens = len(self._running), self._running.context_tokens
            duration_s = self._model.tbt_s(batch, context_tokens)
            await asyncio.sleep(duration_s / self._speedup)
            self._on_step(batch, context_tokens, duration_s)
            for sequence in self._running.members():
                sequence.made.put_nowait(sequence.tokens.pop(0))
            for sequence in self._running.advance():
                self._used_tokens -= sequence.reserved
            self._admit()
        self._steps = None

    def _admit(self) -> None:
        """Admit waiting sequences in order while they fit. A long one is never overtaken, so it cannot starve."""
        while self._waiting and (not self._capacity_tokens or self._used_tokens + self._waiting[0].reserved <= self._capacity_tokens):
            sequence = self._waiting.popleft()
            self._used_tokens += sequence.reserved
            self._running.join(sequence, context_tokens=sequence.prompt_tokens, steps=len(sequence.tokens))
