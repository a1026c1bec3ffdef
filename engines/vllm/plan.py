"""What each step of vLLM's scheduler loads and saves: pure bookkeeping over its requests, with no store and no engine in it.

Blocks are saved when they are confirmed: the first plan that names them is that of a step which was scheduled after the outcome of the one
that computed them was known, for only then does the scheduler know that no load failed under them. That costs one step's delay, and
buys that what was computed on top of a block that did not come is never stored, by no rank of no pipeline, whatever is scheduled ahead.
What is confirmed with the last step of a request is saved by the step after, until which vLLM keeps its blocks (`finished`).

A request's tokens are those of its block hashes, so that tokens which speculation may take back are not in any block that is saved.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class EngineRequest(Protocol):
    """What is used of vLLM's `Request`."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Of the prompt and what has been generated."""

    @property
    def num_computed_tokens(self) -> int:
        """Those scheduled so far among them."""

    @property
    def num_in_flight_tokens(self) -> int:
        """Those of steps whose outcome the scheduler has not seen."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained, of each full `hash_block_tokens`."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks of one request: `blocks[i]` of the engine's pool and the block that has `hashes[i]`."""

    request_id: str
    blocks: list[int]
    hashes: list[bytes]
    parent: bytes | None = None
    """The hash of the block before the first."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the workers do in one step."""

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    finishing: list[str] = field(default_factory=list)
    """Requests of `saves` that are over: the engine keeps their blocks until it is told that these saves have been copied."""
    is_idle: bool = False
    """No tokens are computed in it: whoever has time waits for loads."""


@dataclass(slots=True)
class _Tracked:
    request: EngineRequest
    saved_blocks: int = 0
    """The first blocks of the request, which came from the store or have been handed out to be saved, or which the engine had."""
    first: int = 0
    """The block that the last look-up began with: those before are the engine's."""
    loading: list[int] = field(default_factory=list)
    """Blocks of the pool that are being loaded, from block `loading_from` on."""
    loading_from: int = 0
    has_failed: bool = False
    """A load of it failed: what the store says of its blocks is not believed again."""


class Plan:
    """The scheduler's side of a connector. Used by one thread."""

    def __init__(self, block_tokens: int, *, hash_block_tokens: int, loads: bool = True, saves: bool = True) -> None:
        """`block_tokens` is a multiple of `hash_block_tokens`."""
        self._block_tokens = block_tokens
        self._hashes_a_block = block_tokens // hash_block_tokens
        self._loads = loads
        self._saves = saves
        self._tracked: dict[str, _Tracked] = {}
        self._to_load: list[Transfer] = []
        self._leaving: list[Transfer] = []
        self._held: set[str] = set()

    def wanted(self, request: EngineRequest, computed_tokens: int) -> list[bytes]:
        """The hashes to look for, from the first block on that the engine does not have. Not those of the whole request: the engine has to
        compute one token at least."""
        tracked = self._track(request)
        if not self._loads or tracked.has_failed:
            return []
        first = computed_tokens // self._block_tokens
        return self._hashes(request, first, (request.num_tokens - 1) // self._block_tokens)

    def found(self, request: EngineRequest, computed_tokens: int, block_count: int) -> int:
        """The store has the first `block_count` blocks of those wanted: the number of tokens in them."""
        self._track(request).first = computed_tokens // self._block_tokens
        return block_count * self._block_tokens

    def allocated(self, request: EngineRequest, block_ids: Sequence[int], external_tokens: int) -> None:
        """The engine has given `request` these blocks, and wants `external_tokens` of what was found in them."""
        tracked = self._track(request)
        first = tracked.first
        end = first + external_tokens // self._block_tokens
        tracked.loading, tracked.loading_from = list(block_ids[first:end]), first
        if external_tokens:
            self._to_load.append(Transfer(request.request_id, tracked.loading, self._hashes(request, first, end)))
        # What the engine has by itself was saved when it was computed. It may be what another request loads in this very step: vLLM shares
        # blocks before they are there.
        tracked.saved_blocks = max(tracked.saved_blocks, end)
        tracked.first = 0

    def step(self, block_table: Callable[[str], Sequence[int] | None], scheduled: Iterable[str], *, is_idle: bool) -> StepPlan:
        """The plan of the step that is being scheduled, with the requests `scheduled` in it; `block_table` gives a request's blocks."""
        loads, self._to_load = self._to_load, []
        saves, self._leaving = self._leaving, []
        finishing = [transfer.request_id for transfer in saves]
        if self._saves:
            for request_id in scheduled:
                tracked = self._tracked.get(request_id)
                start, end = self._unsaved(tracked) if tracked else (0, 0)
                if tracked and start < end and (table := block_table(request_id)) is not None:
                    saves.append(self._transfer(tracked.request, table, start, end))
                    tracked.saved_blocks = end
        return StepPlan(loads, saves, finishing, is_idle)

    def failed(self, block_ids: Iterable[int]) -> None:
        """These blocks of the pool were not loaded: the engine computes them, and they are saved again."""
        missing = set(block_ids)
        for tracked in self._tracked.values() if missing else ():
            for place, block in enumerate(tracked.loading):
                if block in missing:
                    tracked.saved_blocks = min(tracked.saved_blocks, tracked.loading_from + place)
                    tracked.has_failed = True
                    tracked.loading = []
                    break

    def finished(self, request: EngineRequest, block_ids: Sequence[int]) -> bool:
        """The request is over: whether the engine has to keep its blocks until they have been copied."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or not self._saves:
            return False
        start, end = self._unsaved(tracked)
        end = min(end, len(block_ids))
        if start >= end:
            return False
        self._leaving.append(self._transfer(request, block_ids, start, end))
        self._held.add(request.request_id)
        return True

    def released(self, request_ids: Iterable[str]) -> None:
        """The engine has been told that these need their blocks no longer."""
        self._held.difference_update(request_ids)

    @property
    def is_holding(self) -> bool:
        """Requests that are over have blocks which are still to be copied."""
        return bool(self._held)

    def check_integrity(self) -> None:
        """Raises AssertionError if it contradicts itself."""
        for request_id, tracked in self._tracked.items():
            assert tracked.request.request_id == request_id
            assert tracked.saved_blocks >= 0
            assert tracked.first >= 0
        for transfer in (*self._to_load, *self._leaving):
            assert 0 < len(transfer.blocks) == len(transfer.hashes)
        assert {transfer.request_id for transfer in self._leaving} <= self._held
        assert not self._held & self._tracked.keys()

    def _track(self, request: EngineRequest) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _Tracked(request)
        return tracked

    def _unsaved(self, tracked: _Tracked) -> tuple[int, int]:
        """Blocks [start, end) that are confirmed and have not been saved."""
        request = tracked.request
        confirmed = (request.num_computed_tokens - request.num_in_flight_tokens) // self._block_tokens
        return tracked.saved_blocks, min(confirmed, len(request.block_hashes) // self._hashes_a_block)

    def _transfer(self, request: EngineRequest, table: Sequence[int], start: int, end: int) -> Transfer:
        parent = self._hashes(request, start - 1, start)[0] if start else None
        return Transfer(request.request_id, list(table[start:end]), self._hashes(request, start, end), parent)

    def _hashes(self, request: EngineRequest, start: int, end: int) -> list[bytes]:
        """A block's hash is that of the last part of it that vLLM hashes: it covers those before."""
        step = self._hashes_a_block
        return [bytes(block) for block in request.block_hashes[(start + 1) * step - 1 : end * step : step]]
