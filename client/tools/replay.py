"""Replays the prompts of a trace as an engine would: read every block of a prompt, compare each byte, store the missing blocks.

Every block's bytes derive from its id, so nothing has to be remembered to check them. The first wrong byte ends the replay. It knows
neither clusters nor terminals.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.client.tools.block_bytes import BlockArena, block_key
from kvstore.kvcache.traces.mooncake import TraceRequest

NAMESPACE: Final = "replay"
ARENA_BYTES: Final = 64 << 20
"""Bytes in one batch, twice: those read and those expected. A longer prompt is read in parts."""
MAX_BATCH_BLOCKS: Final = 1024


class Store(Protocol):
    """What a replay needs of a Client."""

    def get_batch_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int | None]: ...

    def put_batch(
        self, keys: Sequence[bytes], values: Sequence[memoryview], *, namespace: str, parents: Sequence[bytes | None]
    ) -> list[bool]: ...


@dataclass(slots=True)
class ReplayCounts:
    """What was replayed so far. Seconds are those spent inside the store's calls."""

    requests: int = 0
    blocks: int = 0
    prefix_hits: int = 0
    """Blocks before a request's first miss."""
    hits: int = 0
    stored: int = 0
    """Blocks that this replay stored; the others were stored meanwhile, or are repeated in one prompt."""
    wrong_bytes: int = 0
    wrong_block: str = ""
    """The block that ended the replay, "" if none did."""
    get_bytes: int = 0
    get_s: float = 0.0
    put_bytes: int = 0
    put_s: float = 0.0

    @property
    def prefix_hit_ratio(self) -> float:
        return self.prefix_hits / self.blocks if self.blocks else 0.0

    @property
    def get_bytes_per_s(self) -> float:
        return self.get_bytes / self.get_s if self.get_s else 0.0

    @property
    def put_bytes_per_s(self) -> float:
        return self.put_bytes / self.put_s if self.put_s else 0.0


class Replay:
    """One replay against one store, one request after the other. `counts` may be read at any time."""

    def __init__(self, store: Store, *, block_bytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Raises InvalidArgument for a block size below 1."""
        self._store = store
        self._clock = clock
        blocks = min(MAX_BATCH_BLOCKS, max(1, ARENA_BYTES // max(1, block_bytes)))
        self._read = BlockArena(blocks, block_bytes)
        self._expected = BlockArena(blocks, block_bytes)
        self.counts = ReplayCounts()

    def run(self, requests: Iterable[TraceRequest], on_request: Callable[[ReplayCounts], None] = lambda counts: None) -> ReplayCounts:
        """Replay until the end, or until bytes are wrong (`counts.wrong_bytes`). Raises what the store and the trace raise."""
        for request in requests:
            self.request(request.hash_ids)
            on_request(self.counts)
            if self.counts.wrong_bytes:
                break
        return self.counts

    def request(self, ids: Sequence[int]) -> None:
        """Replay one prompt."""
        keys = [block_key(block, self._read.block_bytes) for block in ids]
        self.counts.requests += 1
        self.counts.blocks += len(ids)
        found: list[bool] = []
        for start in range(0, len(ids), len(self._read)):
            found += self._get(ids[start : start + len(self._read)], keys[start : start + len(self._read)], start)
            if self.counts.wrong_bytes:
                return
        misses = [index for index, hit in enumerate(found) if not hit]
        self.counts.hits += len(found) - len(misses)
        self.counts.prefix_hits += misses[0] if misses else len(found)
        for start in range(0, len(misses), len(self._expected)):
            self._put(ids, keys, misses[start : start + len(self._expected)])

    def _get(self, ids: Sequence[int], keys: Sequence[bytes], first: int) -> list[bool]:
        begin = self._clock()
        sizes = self._store.get_batch_into(keys, self._read.views[: len(keys)])
        self.counts.get_s += self._clock() - begin
        self.counts.get_bytes += sum(size for size in sizes if size is not None)
        if any(size is not None for size in sizes):
            self._check(ids, sizes, first)
        return [size is not None for size in sizes]

    def _check(self, ids: Sequence[int], sizes: Sequence[int | None], first: int) -> None:
        """Compare every block that came back with what its id stands for."""
        block_bytes = self._read.block_bytes
        self._expected.make(ids)
        wrong = self._read.wrong_bytes(self._expected, len(ids))
        for index, size in enumerate(sizes):
            if size is None:
                continue
            count = int(wrong[index]) if size == block_bytes else max(size, block_bytes)
            if count and not self.counts.wrong_bytes:
                self.counts.wrong_bytes = count
                self.counts.wrong_block = f"block {ids[index]} (number {first + index} of request {self.counts.requests})"

    def _put(self, ids: Sequence[int], keys: Sequence[bytes], misses: Sequence[int]) -> None:
        self._expected.make([ids[index] for index in misses])
        parents = [keys[index - 1] if index else None for index in misses]
        begin = self._clock()
        stored = self._store.put_batch(
            [keys[index] for index in misses], self._expected.views[: len(misses)], namespace=NAMESPACE, parents=parents
        )
        self.counts.put_s += self._clock() - begin
        self.counts.stored += sum(stored)
        self.counts.put_bytes += sum(stored) * self._read.block_bytes
