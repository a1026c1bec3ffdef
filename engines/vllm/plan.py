"""Scheduler-side plan: which blocks each engine step loads and saves, for every group of layers.

Bookkeeping over vLLM's requests, without a store, an engine or a clock. One thread calls it, the scheduler's.

**Groups.** Each group of layers has its own block table, as vLLM's hybrid cache manager makes them. Models with uniform
layers have one group. Sliding-window layers need only the blocks of the last tokens, and the engine frees the others
while the request runs. Layers with a recurrent state (Mamba, short convolutions) have blocks at some positions only;
such a block holds the state after its last token.

**Saves.** A block is saved once it is confirmed: in the plan of a step that was scheduled after the outcome of the step
that computed it was known. Only then does the scheduler know that no load below it failed. This costs one step of
delay. In return no rank of any pipeline stores data that was computed on top of a failed load. Blocks that the last
step of a request confirms are saved by the next step; vLLM keeps them until then (`finished`).

The pool block of each position is recorded in the step that computes it. The engine may free a window's blocks in the
very step that confirms them, but the copy is made before that.

Only tokens that block hashes cover are saved, so no saved block holds speculative tokens that may be rolled back.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

from kvstore.client.tensors.groups import Present, can_resume
from kvstore.engines.retention import RequestRetention
from kvstore.engines.vllm.identity import Variant
from kvstore.protocol.retention import Retention


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table."""

    block_tokens: int
    window_tokens: int = 0
    """Tokens before a position that a request needs to resume there. 0: all of them. 1 for a state."""
    is_state: bool = False
    """The engine reports which of its blocks hold a complete state: see `SchedulerPlan.step`."""

    def first_needed(self, tokens: int) -> int:
        """Return the index of the first block that a request needs to resume after `tokens`."""
        return max(0, tokens - self.window_tokens) // self.block_tokens if self.window_tokens else 0

    def can_go_on(self, present: Present) -> Present:
        """Return, for each block of a sequence, whether a request can resume at the block's end."""
        return can_resume(present, block_tokens=self.block_tokens, window_tokens=self.window_tokens)


def loads_all_or_nothing(groups: Sequence[LayerGroup]) -> bool:
    """Return whether one missing block fails the whole load of a request.

    True for windows, because the blocks before the missing one are no usable prefix if only a window was loaded. True
    for several groups, because vLLM cannot report which group a block belongs to.
    """
    return len(groups) > 1 or any(group.window_tokens for group in groups)


BlockTables = Sequence[Sequence[int]]
"""Pool blocks of a request, for each group of layers."""


class EngineRequest(Protocol):
    """The part of vLLM's `Request` that the plan uses."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens scheduled so far."""

    @property
    def num_in_flight_tokens(self) -> int:
        """Tokens of steps whose outcome the scheduler does not know yet."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hash of each full `hash_block_tokens`."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """Unvalidated parameters from the HTTP client."""


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Blocks of one request and group to copy: `blocks[i]` of the engine's pool has the hash `hashes[i]`."""

    request_id: str
    blocks: list[int]
    hashes: list[bytes]
    parent: bytes | None = None
    """Hash of the block before the first one. None: the first block starts the sequence."""
    group: int = 0
    variant: Variant = Variant("")
    retention: Retention | None = None
    """Hint of the request for these blocks."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Loads and saves that the ranks carry out in one step."""

    loads: list[BlockTransfer] = field(default_factory=list)
    """Transfers of one request are adjacent."""
    saves: list[BlockTransfer] = field(default_factory=list)
    finishing: list[str] = field(default_factory=list)
    """Finished requests among `saves`. The engine keeps their blocks until the ranks report these saves as copied."""
    is_idle: bool = False
    """The step computes no tokens, so ranks may wait for loads."""


@dataclass(slots=True)
class _Progress:
    """Saved and computed blocks of one request in one group."""

    saved: int = 0
    """Leading blocks that need no save: loaded, already planned for saving, or cached by the engine."""
    recorded: int = 0
    """Leading blocks whose pool block is recorded."""
    places: dict[int, int] = field(default_factory=dict)
    """Pool block of each block index that is computed but not saved."""
    hits: Sequence[int] = ()
    """Leading pool blocks that the engine's own prefix cache had when the request was allocated. Empty for a window,
    which frees them while the request runs."""

    def take(self, start: int, end: int) -> dict[int, int]:
        """Remove and return the recorded blocks with an index in [start, end). Indices below `start` are dropped."""
        taken = {place: block for place, block in self.places.items() if start <= place < end}
        self.places = {place: block for place, block in self.places.items() if place >= end}
        return taken

    def restart(self, saved: int) -> None:
        self.saved = self.recorded = saved
        self.places.clear()

    def adopt(self, left: dict[int, int]) -> None:
        """Adopt those unsaved blocks `left` by a finished request that this request shares, and remove them from
        `left`."""
        shared = [place for place, block in left.items() if place < len(self.hits) and self.hits[place] == block]
        self.places = dict(sorted({**self.places, **{place: left.pop(place) for place in shared}}.items()))
        self.saved = min([self.saved, *shared])


@dataclass(slots=True)
class _TrackedRequest:
    """State of a request that is not finished."""

    request: EngineRequest
    groups: list[_Progress]
    retention: RequestRetention | None = None
    """Hints of its client for its blocks."""
    variant: Variant | None = None
    """Weights and adapter that compute the request, fixed once it has begun. None: unknown; nothing is loaded or
    saved."""
    has_begun: bool = False
    """The engine has allocated blocks for it."""
    has_computed: bool = False
    """The engine has computed tokens of it."""
    is_outdated: bool = False
    """Its weights or adapter changed after it began: nothing of it is loaded or saved any more."""
    first_tokens: int = 0
    """Tokens that the engine had at the last lookup."""
    loading: list[int] = field(default_factory=list)
    """Pool blocks of the first group that are being loaded."""
    loading_from: int = 0
    """Tokens before the first block that is being loaded."""
    has_failed: bool = False
    """A load of it failed; the store is not asked for it again."""
    is_tainted: bool = False
    """It uses blocks that another request failed to load: what it computes is not saved."""


@dataclass(frozen=True, slots=True)
class _FinishedRequest:
    """Blocks of a finished request that are still to be saved."""

    transfer: BlockTransfer
    freed: frozenset[int]
    """Blocks of the transfer that the engine has already freed."""


class SchedulerPlan:
    """Plans the loads and saves of each step. One thread calls it, the scheduler's."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        *,
        hash_block_tokens: int,
        is_whole: Callable[[int], bool],
        variant: Callable[[EngineRequest], Variant | None],
        retention: Callable[[EngineRequest], RequestRetention | None] = lambda request: None,
        loads: bool = True,
        saves: bool = True,
    ) -> None:
        """Create an empty plan.

        Args:
            groups: their block sizes are multiples of `hash_block_tokens`.
            is_whole: whether a freed block keeps its contents until this step's saves are copied.
            variant: weights and adapter that compute a new request, None while they are unknown.
            retention: hints of a new request's client. Called once for each request.
        """
        self._groups = groups
        self._hash_block_tokens = hash_block_tokens
        self._step_tokens = math.lcm(*(group.block_tokens for group in groups))
        self._is_whole = is_whole
        self._variant = variant
        self._retention = retention
        self._loads = loads
        self._saves = saves
        self._tracked: dict[str, _TrackedRequest] = {}
        self._to_load: list[BlockTransfer] = []
        self._next_tables: dict[str, list[int]] = {}
        """First group's block tables that were allocated for the step to be planned next, by request."""
        self._last_tables: dict[str, list[int]] = {}
        """The same for the step that was planned last."""
        self._finished_requests: list[_FinishedRequest] = []
        self._held: set[str] = set()
        self._prepared: Collection[int] = ()
        """Argument of the `step` call in progress."""

    def reads(self, request: EngineRequest) -> bool:
        """Return whether the store may be asked for the request's blocks."""
        return self._loads and not self._track(request).has_failed and self.variant(request) is not None

    def missing_hashes(self, request: EngineRequest, computed_tokens: int) -> list[list[bytes]]:
        """Return the block hashes to look up for each group, from the first block that the engine does not have.

        The block of the last token is left out, because the engine has to compute at least one token.
        """
        if not self.reads(request):
            return [[] for _ in self._groups]
        last = (request.num_tokens - 1) // self._step_tokens * self._step_tokens
        return [self._hashes(request, group, computed_tokens // group.block_tokens, last // group.block_tokens) for group in self._groups]

    def variant(self, request: EngineRequest) -> Variant | None:
        """Return the weights and adapter that compute the request. None: nothing of it is loaded or saved."""
        tracked = self._track(request)
        if not tracked.has_begun:
            tracked.variant = self._variant(request)
        return None if tracked.is_outdated else tracked.variant

    def adapters(self) -> list[Any]:
        """Return the LoRAs of all tracked requests, each once."""
        of_requests = [getattr(tracked.request, "lora_request", None) for tracked in self._tracked.values()]
        return list({lora.lora_int_id: lora for lora in of_requests if lora is not None}.values())

    def change_variants(self) -> None:
        """Stop loads and saves of requests that began with other weights or another adapter than the current ones.

        Blocks that were computed before the change and wait to be copied are saved under their old variant.
        """
        for tracked in self._tracked.values():
            if tracked.has_begun and not tracked.is_outdated and self._variant(tracked.request) != tracked.variant:
                tracked.is_outdated = True
                tracked.is_tainted = tracked.is_tainted or tracked.request.num_computed_tokens > 0
                for progress in tracked.groups:
                    progress.places.clear()

    def requeued(self, request_ids: Iterable[str]) -> None:
        """The engine took back the blocks of these requests. A request without computed tokens begins again."""
        for request_id in request_ids:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.has_begun = tracked.has_computed
                for progress in tracked.groups:
                    progress.restart(0)

    def found(self, request: EngineRequest, computed_tokens: int) -> None:
        """The store was asked for the request's blocks after `computed_tokens`."""
        self._track(request).first_tokens = computed_tokens

    def allocated(self, request: EngineRequest, tables: BlockTables, external_tokens: int) -> None:
        """The engine allocated `tables` for `request` and will load `external_tokens` of what was found into them."""
        tracked = self._track(request)
        variant = self.variant(request)
        tracked.has_begun = True
        tracked.is_outdated = variant is None
        start = tracked.first_tokens
        end = start + external_tokens
        self._next_tables[request.request_id] = list(tables[0])
        tracked.loading, tracked.loading_from, tracked.first_tokens = [], start, 0
        for place, (group, table, progress) in enumerate(zip(self._groups, tables, tracked.groups, strict=True)):
            first, last = max(start // group.block_tokens, group.first_needed(end)), end // group.block_tokens
            if external_tokens and first < last:
                hashes = self._hashes(request, group, first, last)
                assert variant is not None, "nothing was looked for"
                load = BlockTransfer(request.request_id, list(table[first:last]), hashes, group=place, variant=variant)
                self._to_load += _by_hint(load, range(first, last), group.block_tokens, tracked.retention)
                if place == 0:
                    tracked.loading = load.blocks
            # Prefix-cache hits are saved by the request that computed them, or by this one if that one ends first
            # (`finished`). Another request may load or compute them in this very step: vLLM shares blocks early.
            unsaved = dict(progress.places)
            progress.restart(max(progress.saved, end // group.block_tokens))
            progress.hits = () if group.window_tokens else table[: start // group.block_tokens]
            progress.adopt(unsaved)

    def step(
        self,
        block_tables: Callable[[str], BlockTables | None],
        scheduled: Mapping[str, int],
        states: Mapping[str, Sequence[tuple[int, int, int]]],
        *,
        is_idle: bool,
        prepared: Collection[int] = (),
    ) -> StepPlan:
        """Return the plan of the step that is being scheduled.

        Args:
            block_tables: returns a request's block tables, None if it has none.
            scheduled: tokens that each request computes in this step.
            states: (group, block, tokens) for requests with a state: after this step `block` has the state after
                `tokens`.
            is_idle: the step computes no tokens.
            prepared: blocks that the engine may zero or copy to before this step's saves are copied. They are listed
                even if the request that they were allocated for was preempted before the step.
        """
        loads, self._to_load = self._to_load, []
        self._last_tables, self._next_tables = self._next_tables, {}
        leaving, self._finished_requests = self._finished_requests, []
        self._prepared = prepared
        saves = [kept for over in leaving if (kept := self._copyable(over.transfer, over.freed))]
        finishing = list(dict.fromkeys(over.transfer.request_id for over in leaving))
        for request_id, tokens in scheduled.items():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.has_computed = True
                if self._saves and not tracked.is_tainted and not tracked.is_outdated:
                    saves += self._step(tracked, block_tables, tokens, states.get(request_id, ()))
        return StepPlan(loads, saves, finishing, is_idle)

    def tainted_blocks(self, block_tables: Callable[[str], BlockTables | None], scheduled: Iterable[str]) -> set[int]:
        """Return all blocks of the `scheduled` requests that build on failed loads or on other weights.

        The engine hashes what these requests compute, so their hashes have to be dropped in each step.
        """
        barred = [request_id for request_id in scheduled if request_id in self._tracked and self._tracked[request_id].is_tainted]
        return {block for request_id in barred for table in block_tables(request_id) or () for block in table}

    def failed_blocks(self, block_ids: Iterable[int]) -> set[int]:
        """Handle pool blocks that were not loaded: the engine recomputes them and they are saved again. For models with
        one group.

        Returns the blocks whose hashes the engine has to drop: `block_ids`, and all that follow them in tables of this
        step. vLLM has hashed and shared them by now if the load is part of the step, and the request that recomputes
        them may end first or take several steps. Other requests do not save blocks that build on them.
        """
        missing = set(block_ids)
        invalid_blocks: set[int] = set()
        for tracked in self._tracked.values() if missing else ():
            first = next((place for place, block in enumerate(tracked.loading) if block in missing), None)
            if first is not None:
                self._fail(tracked, tracked.loading_from + first * self._step_tokens)
        for request_id, table in self._last_tables.items() if missing else ():
            first = next((place for place, block in enumerate(table) if block in missing), len(table))
            invalid_blocks.update(table[first:])
            sharing = self._tracked.get(request_id) if first < len(table) else None
            if sharing is not None and table[first] not in sharing.loading:
                sharing.is_tainted = True
                for progress in sharing.groups:
                    progress.places.clear()
        return invalid_blocks

    def failed_requests(self, request_ids: Iterable[str]) -> None:
        """The loads of these requests failed: the engine starts them again without loads."""
        for request_id in request_ids:
            if (tracked := self._tracked.get(request_id)) is not None:
                self._fail(tracked, tracked.loading_from)

    def finished(self, request: EngineRequest, tables: BlockTables) -> bool:
        """The request finished with `tables`. Return whether the engine has to keep its blocks until they are
        copied."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or not self._saves:
            return False
        for transfer in self._unsaved(tracked):
            freed = frozenset(transfer.blocks).difference(tables[transfer.group])
            self._finished_requests.append(_FinishedRequest(transfer, freed))
            self._held.add(request.request_id)
        for place, progress in enumerate(tracked.groups):
            for other in self._tracked.values() if progress.places else ():
                if not other.is_tainted and not other.is_outdated and other.variant == tracked.variant:
                    other.groups[place].adopt(progress.places)
        return request.request_id in self._held

    def released(self, request_ids: Iterable[str]) -> None:
        """The engine was notified that the blocks of these requests are copied."""
        self._held.difference_update(request_ids)

    @property
    def is_holding(self) -> bool:
        """True if blocks of finished requests are still to be copied."""
        return bool(self._held)

    def check_integrity(self) -> None:
        """Check the invariants between requests, transfers and held blocks. Raises AssertionError."""
        for request_id, tracked in self._tracked.items():
            assert tracked.request.request_id == request_id
            assert tracked.first_tokens >= 0
            for progress in tracked.groups:
                assert 0 <= progress.saved
                assert all(progress.saved <= place for place in progress.places)
        for transfer in (*self._to_load, *(over.transfer for over in self._finished_requests)):
            assert 0 < len(transfer.blocks) == len(transfer.hashes)
        assert {over.transfer.request_id for over in self._finished_requests} <= self._held
        assert not self._held & self._tracked.keys()

    def _track(self, request: EngineRequest) -> _TrackedRequest:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            progress = [_Progress() for _ in self._groups]
            tracked = self._tracked[request.request_id] = _TrackedRequest(request, progress, self._retention(request))
        return tracked

    def _step(
        self,
        tracked: _TrackedRequest,
        block_tables: Callable[[str], BlockTables | None],
        tokens: int,
        states: Sequence[tuple[int, int, int]],
    ) -> list[BlockTransfer]:
        """Return a request's saves, then record the pool blocks that this step computes."""
        saves = self._unsaved(tracked)
        computed = tracked.request.num_computed_tokens + tokens
        ends = [computed // group.block_tokens for group in self._groups]
        is_noted = all(group.is_state or end <= of.recorded for group, end, of in zip(self._groups, ends, tracked.groups, strict=True))
        has_windows = any(self._groups[transfer.group].window_tokens for transfer in saves)
        tables = block_tables(tracked.request.request_id) if has_windows or not is_noted else None
        saves = [kept for save in saves if (kept := self._copyable(save, self._freed_blocks(save, tables)))]
        for place, (group, end, progress) in enumerate(zip(self._groups, ends, tracked.groups, strict=True)):
            if tables is not None and not group.is_state:
                start = max(progress.saved, progress.recorded)
                blocks = tables[place][start:end]
                progress.places.update(zip(range(start, start + len(blocks)), blocks, strict=True))
                progress.recorded = start + len(blocks)
        for place, block, boundary in states:
            index, rest = divmod(boundary, self._groups[place].block_tokens)
            if not rest and index > tracked.groups[place].saved:
                tracked.groups[place].places[index - 1] = block
        return saves

    def _unsaved(self, tracked: _TrackedRequest) -> list[BlockTransfer]:
        """Return the confirmed, unsaved blocks and mark them as saved."""
        request, variant = tracked.request, tracked.variant
        if variant is None or tracked.is_outdated:
            return []
        hashed = len(request.block_hashes) * self._hash_block_tokens
        confirmed = min(request.num_computed_tokens - request.num_in_flight_tokens, hashed)
        transfers = []
        for place, (group, progress) in enumerate(zip(self._groups, tracked.groups, strict=True)):
            start, end = progress.saved, confirmed // group.block_tokens
            if start < end and (blocks := progress.take(start, end)):
                hashes = self._hashes(request, group, start, end)
                first = min(blocks)
                parent = self._hashes(request, group, first - 1, first)[0] if first else None
                names = [hashes[block - start] for block in blocks]
                save = BlockTransfer(request.request_id, list(blocks.values()), names, parent, place, variant)
                transfers += _by_hint(save, blocks, group.block_tokens, tracked.retention)
            progress.saved = max(progress.saved, end)
        return transfers

    def _freed_blocks(self, transfer: BlockTransfer, tables: BlockTables | None) -> frozenset[int]:
        """Return blocks of the transfer that the running request no longer has: its window or state moved on."""
        if tables is None or not self._groups[transfer.group].window_tokens:
            return frozenset()
        return frozenset(transfer.blocks).difference(tables[transfer.group])

    def _copyable(self, transfer: BlockTransfer, freed: frozenset[int]) -> BlockTransfer | None:
        """Return `transfer` without the freed blocks (`freed`) whose contents may be overwritten before the copy;
        None if no block is left."""
        lost = {block for block in freed if block in self._prepared or not self._is_whole(block)}
        if not lost:
            return transfer
        kept = [(block, name) for block, name in zip(transfer.blocks, transfer.hashes, strict=True) if block not in lost]
        if not kept:
            return None
        blocks, hashes = zip(*kept, strict=True)
        return replace(transfer, blocks=list(blocks), hashes=list(hashes))

    def _fail(self, tracked: _TrackedRequest, tokens: int) -> None:
        """Mark as not loaded what follows the first `tokens`."""
        tracked.has_failed = True  # `loading` stays: another rank may report earlier blocks in a later step
        for group, progress in zip(self._groups, tracked.groups, strict=True):
            progress.restart(min(progress.saved, tokens // group.block_tokens))

    def _hashes(self, request: EngineRequest, group: LayerGroup, start: int, end: int) -> list[bytes]:
        """Return the hashes of blocks [start, end). A block has the hash of its last `hash_block_tokens`, which
        covers those before."""
        step = group.block_tokens // self._hash_block_tokens
        return [bytes(block) for block in request.block_hashes[(start + 1) * step - 1 : end * step : step]]


def _by_hint(transfer: BlockTransfer, places: Iterable[int], block_tokens: int, hints: RequestRetention | None) -> list[BlockTransfer]:
    """Return the transfer in parts of equal hints. `places`: index in the sequence of each of its blocks."""
    if hints is None:
        return [transfer]
    parts: list[BlockTransfer] = []
    start = 0
    for hint, run in groupby(hints.of_block(place * block_tokens, (place + 1) * block_tokens) for place in places):
        end = start + sum(1 for _ in run)
        parent = transfer.hashes[start - 1] if start else transfer.parent
        part = replace(transfer, blocks=transfer.blocks[start:end], hashes=transfer.hashes[start:end], parent=parent, retention=hint)
        parts.append(part)
        start = end
    return parts
