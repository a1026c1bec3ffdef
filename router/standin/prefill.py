"""What a stand-in prefill engine does with a prompt: waits its turn, reads the blocks that are cached, takes the time that a GPU would
for the others, and stores them. Of one event loop; times are the model's own, which pass `speedup` times faster than the clock's."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import Corrupt, KVStoreError
from kvstore.router.standin.blocks import BlockStore
from kvstore.scheduler.estimators.interface import PrefillTime
from kvstore.scheduler.request import Request

log = logging.getLogger("kvstore.router")

Clock = Callable[[], float]
"""Seconds, from any start."""


@dataclass(frozen=True, slots=True)
class Prefilled:
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

    async def run(self, tokens: Sequence[int], *, prefix_blocks: int, on_queued: Callable[[], None]) -> Prefilled:
        """Compute `tokens`, of which `prefix_blocks` blocks are said to be cached. `on_queued` is called once `queue_s` includes it.

        Raises Corrupt: a block in the store has wrong bytes. Cancelled, it leaves the queue.
        """
        request = Request(self._namespace.block_keys(tokens), len(tokens), self._namespace.block_tokens)
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
        return Prefilled(prefix_tokens, await self._store(keys, loaded), duration_s)

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
