"""Plan of what each step of vLLM's scheduler loads and saves, for all groups of layers.

Groups of an engine's layers with a block table each, as vLLM's hybrid cache manager makes them: which blocks of each a prefix needs.

A model whose layers are all alike is one group. Layers with a sliding window need the blocks of the last tokens only, and their engine lets
the others go while the request runs; layers with a recurrent state (Mamba, short convolutions) have a block at some of its places, which
holds the state after the last token there.

What each step of vLLM's scheduler loads and saves: pure bookkeeping over its requests, with no store and no engine in it.

Blocks are saved when they are confirmed: the first plan that names them is that of a step which was scheduled after the outcome of the one
that computed them was known, for only then does the scheduler know that no load failed under them. That costs one step's delay, and
buys that what was computed on top of a block that did not come is never stored, by no rank of no pipeline, whatever is scheduled ahead.
What is confirmed with the last step of a request is saved by the step after, until which vLLM keeps its blocks (`finished`).

Where a block lies is noted in the step that computes it: the engine lets a window's blocks go in the very step in which they are confirmed,
before which they are copied, too.

A request's tokens are those of its block hashes, so that tokens which speculation may take back are not in any block that is saved.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvstore.client.tensors.groups import Present, can_resume
from kvstore.engines.vllm.identity import Variant


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """What the plan knows of one."""

    block_tokens: int
    window_tokens: int = 0
    """How many tokens before a position are needed to go on from there; 0: all. 1 for a state."""
    is_state: bool = False
    """The engine says by itself which of its blocks holds a state that is whole: see `SchedulerPlan.step`."""

    def first_needed(self, tokens: int) -> int:
        """The first block that is needed to go on after so many tokens."""
        return max(0, tokens - self.window_tokens) // self.block_tokens if self.window_tokens else 0

    def can_go_on(self, present: Present) -> Present:
        """For each block of a sequence whether its end is a position from which these layers can go on."""
        return can_resume(present, block_tokens=self.block_tokens, window_tokens=self.window_tokens)


def fail_whole(groups: Sequence[LayerGroup]) -> bool:
    """Whether a block that does not come fails all that its request was to load: what lies before it is no prefix to go on from where only
    a window's blocks were loaded, and vLLM cannot say of which of several groups a block is."""
    return len(groups) > 1 or any(group.window_tokens for group in groups)


BlockTables = Sequence[Sequence[int]]
"""Of each group of layers the blocks of a request, of the engine's pool."""


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

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """As a client gave it: anything may be in it."""


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Blocks of one request and group: `blocks[i]` of the engine's pool and the block that has `hashes[i]`."""

    request_id: str
    blocks: list[int]
    hashes: list[bytes]
    parent: bytes | None = None
    """The hash of the block before the first."""
    group: int = 0
    variant: Variant = Variant("")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the workers do in one step."""

    loads: list[BlockTransfer] = field(default_factory=list)
    """Those of a request follow one another."""
    saves: list[BlockTransfer] = field(default_factory=list)
    finishing: list[str] = field(default_factory=list)
    """Requests of `saves` that are over: the engine keeps their blocks until it is told that these saves have been copied."""
    is_idle: bool = False
    """No tokens are computed in it: whoever has time waits for loads."""


@dataclass(slots=True)
class _Progress:
    """Of a request in one group."""

    saved: int = 0
    """The first blocks of the request, which came from the store or have been handed out to be saved, or which the engine had."""
    noted: int = 0
    """Up to here it has been noted where blocks lie."""
    places: dict[int, int] = field(default_factory=dict)
    """Blocks of the pool, by their place in the request: those computed and not saved."""
    hits: Sequence[int] = ()
    """The first blocks, which the engine had when it gave the request its table, and the request has for as long as it runs: none of a
    window, which lets them go."""

    def take(self, start: int, end: int) -> dict[int, int]:
        """Those of the places [start, end), which are not kept."""
        taken = {place: block for place, block in self.places.items() if start <= place < end}
        self.places = {place: block for place, block in self.places.items() if place >= end}
        return taken

    def restart(self, saved: int) -> None:
        self.saved = self.noted = saved
        self.places.clear()

    def take_over(self, left: dict[int, int]) -> None:
        """Of the blocks `left` by another request, which had not saved them, have those that are hits saved by this one; the rest stays."""
        shared = [place for place, block in left.items() if place < len(self.hits) and self.hits[place] == block]
        self.places = dict(sorted({**self.places, **{place: left.pop(place) for place in shared}}.items()))
        self.saved = min([self.saved, *shared])


@dataclass(slots=True)
class _TrackedRequest:
    request: EngineRequest
    groups: list[_Progress]
    variant: Variant | None = None
    """Weights and adapter that compute it; fixed once it has begun. None: unknown, so that nothing of it is loaded or saved."""
    has_begun: bool = False
    """The engine has given it blocks."""
    has_computed: bool = False
    """The engine has computed tokens of it."""
    is_outdated: bool = False
    """Weights or adapter have changed since it began: nothing of it is loaded or saved any more."""
    first_tokens: int = 0
    """Those before are the engine's, said the last look-up."""
    loading: list[int] = field(default_factory=list)
    """Blocks of the pool that are being loaded, of the first group."""
    loading_from: int = 0
    """The tokens before those that are being loaded."""
    has_failed: bool = False
    """A load of it failed: what the store says of its blocks is not believed again."""
    is_barred: bool = False
    """It stands on blocks that another request did not load: what it computes is not saved."""


@dataclass(frozen=True, slots=True)
class _FinishedRequest:
    """What is still to be saved of a request that is over."""

    transfer: BlockTransfer
    loose: frozenset[int]
    """Blocks among them that the engine has let go."""


class SchedulerPlan:
    """The scheduler's side of a connector. Used by one thread."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        *,
        hash_block_tokens: int,
        is_whole: Callable[[int], bool],
        variant: Callable[[EngineRequest], Variant | None],
        loads: bool = True,
        saves: bool = True,
    ) -> None:
        """The blocks of each group are multiples of `hash_block_tokens`. `is_whole`: nobody who has been given a block that was let go
        writes to it before this step's saves are copied. `variant`: weights and adapter that a new request is computed by, None while
        they are unknown."""
        self._groups = groups
        self._hash_block_tokens = hash_block_tokens
        self._step_tokens = math.lcm(*(group.block_tokens for group in groups))
        self._is_whole = is_whole
        self._variant = variant
        self._loads = loads
        self._saves = saves
        self._tracked: dict[str, _TrackedRequest] = {}
        self._to_load: list[BlockTransfer] = []
        self._to_give: dict[str, list[int]] = {}
        """Tables of the first group, by request, that were given out for the step that is still to be planned."""
        self._given: dict[str, list[int]] = {}
        """The same of the step that was planned last."""
        self._leaving: list[_FinishedRequest] = []
        self._held: set[str] = set()
        self._prepared: Collection[int] = ()
        """See `step`: of the step that is being planned."""

    def reads(self, request: EngineRequest) -> bool:
        """Whether the store may be asked for the request's blocks."""
        return self._loads and not self._track(request).has_failed and self.variant(request) is not None

    def wanted(self, request: EngineRequest, computed_tokens: int) -> list[list[bytes]]:
        """The hashes to look for, of each group, from the first block on that the engine does not have. Not those of the whole request: the
        engine has to compute one token at least."""
        if not self.reads(request):
            return [[] for _ in self._groups]
        last = (request.num_tokens - 1) // self._step_tokens * self._step_tokens
        return [self._hashes(request, group, computed_tokens // group.block_tokens, last // group.block_tokens) for group in self._groups]

    def variant(self, request: EngineRequest) -> Variant | None:
        """Weights and adapter that the request's blocks are computed by. None: nothing of it is to be loaded or saved."""
        tracked = self._track(request)
        if not tracked.has_begun:
            tracked.variant = self._variant(request)
        return None if tracked.is_outdated else tracked.variant

    def adapters(self) -> list[Any]:
        """LoRAs of the requests."""
        of_requests = [getattr(tracked.request, "lora_request", None) for tracked in self._tracked.values()]
        return list({lora.lora_int_id: lora for lora in of_requests if lora is not None}.values())

    def change_variants(self) -> None:
        """Weights or adapters have changed. A request that began with others is neither loaded nor saved from now on. What was computed
        before the change and waits to be copied is saved as what it is."""
        for tracked in self._tracked.values():
            if tracked.has_begun and not tracked.is_outdated and self._variant(tracked.request) != tracked.variant:
                tracked.is_outdated = True
                tracked.is_barred = tracked.is_barred or tracked.request.num_computed_tokens > 0
                for progress in tracked.groups:
                    progress.places.clear()

    def requeued(self, request_ids: Iterable[str]) -> None:
        """The engine took back what it had given these requests to load into. Those of which it computed nothing begin again."""
        for request_id in request_ids:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.has_begun = tracked.has_computed
                for progress in tracked.groups:
                    progress.restart(0)

    def found(self, request: EngineRequest, computed_tokens: int) -> None:
        """The store has been asked for what is wanted after `computed_tokens`."""
        self._track(request).first_tokens = computed_tokens

    def allocated(self, request: EngineRequest, tables: BlockTables, external_tokens: int) -> None:
        """The engine has given `request` these blocks, and wants `external_tokens` of what was found in them."""
        tracked = self._track(request)
        variant = self.variant(request)
        tracked.has_begun = True
        tracked.is_outdated = variant is None
        start = tracked.first_tokens
        end = start + external_tokens
        self._to_give[request.request_id] = list(tables[0])
        tracked.loading, tracked.loading_from, tracked.first_tokens = [], start, 0
        for place, (group, table, progress) in enumerate(zip(self._groups, tables, tracked.groups, strict=True)):
            first, last = max(start // group.block_tokens, group.first_needed(end)), end // group.block_tokens
            if external_tokens and first < last:
                hashes = self._hashes(request, group, first, last)
                assert variant is not None, "nothing was looked for"
                self._to_load.append(BlockTransfer(request.request_id, list(table[first:last]), hashes, group=place, variant=variant))
                if place == 0:
                    tracked.loading = self._to_load[-1].blocks
            # What the engine has by itself is saved by who computed it, or by this one if that one ends before (`finished`). It may be what
            # another request loads or computes in this very step: vLLM shares blocks before they are there.
            unsaved = dict(progress.places)
            progress.restart(max(progress.saved, end // group.block_tokens))
            progress.hits = () if group.window_tokens else table[: start // group.block_tokens]
            progress.take_over(unsaved)

    def step(
        self,
        block_tables: Callable[[str], BlockTables | None],
        scheduled: Mapping[str, int],
        states: Mapping[str, Sequence[tuple[int, int, int]]],
        *,
        is_idle: bool,
        prepared: Collection[int] = (),
    ) -> StepPlan:
        """The plan of the step that is being scheduled, in which requests compute as many tokens as `scheduled` has.

        `block_tables` gives a request's blocks. `states` has, of requests, (group, block, tokens): once this step is over the block has the
        state after so many tokens of the request. `prepared`: blocks that the engine zeroes or copies to, perhaps before this step's saves
        are copied: for whom it gave them to, even if that one was preempted before the step and nobody has them any more.
        """
        loads, self._to_load = self._to_load, []
        self._given, self._to_give = self._to_give, {}
        leaving, self._leaving = self._leaving, []
        self._prepared = prepared
        saves = [kept for over in leaving if (kept := self._without_lost(over.transfer, over.loose))]
        finishing = list(dict.fromkeys(over.transfer.request_id for over in leaving))
        for request_id, tokens in scheduled.items():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.has_computed = True
                if self._saves and not tracked.is_barred and not tracked.is_outdated:
                    saves += self._step(tracked, block_tables, tokens, states.get(request_id, ()))
        return StepPlan(loads, saves, finishing, is_idle)

    def barred_blocks(self, block_tables: Callable[[str], BlockTables | None], scheduled: Iterable[str]) -> set[int]:
        """Blocks of those of the `scheduled` requests that stand on what was not loaded, or on what other weights computed: the engine has
        to forget their hashes in each step, for it hashes what they compute in it."""
        barred = [request_id for request_id in scheduled if request_id in self._tracked and self._tracked[request_id].is_barred]
        return {block for request_id in barred for table in block_tables(request_id) or () for block in table}

    def failed_blocks(self, block_ids: Iterable[int]) -> set[int]:
        """These blocks of the pool were not loaded: the engine computes them, and they are saved again. Of models with one group.

        Returns those whose hashes the engine has to forget: these blocks, and all behind them in tables of this step. Where a load is part
        of the step vLLM has hashed and shared them by now, and who was to compute them may be gone, or take several steps. What
        other requests compute that share them is not saved.
        """
        missing = set(block_ids)
        hollow: set[int] = set()
        for tracked in self._tracked.values() if missing else ():
            first = next((place for place, block in enumerate(tracked.loading) if block in missing), None)
            if first is not None:
                self._fail(tracked, tracked.loading_from + first * self._step_tokens)
        for request_id, table in self._given.items() if missing else ():
            first = next((place for place, block in enumerate(table) if block in missing), len(table))
            hollow.update(table[first:])
            sharing = self._tracked.get(request_id) if first < len(table) else None
            if sharing is not None and table[first] not in sharing.loading:
                sharing.is_barred = True
                for progress in sharing.groups:
                    progress.places.clear()
        return hollow

    def failed_requests(self, request_ids: Iterable[str]) -> None:
        """What these requests were to load did not come: the engine begins them anew."""
        for request_id in request_ids:
            if (tracked := self._tracked.get(request_id)) is not None:
                self._fail(tracked, tracked.loading_from)

    def finished(self, request: EngineRequest, tables: BlockTables) -> bool:
        """The request is over, with these blocks: whether the engine has to keep them until they have been copied."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or not self._saves:
            return False
        for transfer in self._unsaved(tracked):
            loose = frozenset(transfer.blocks).difference(tables[transfer.group])
            self._leaving.append(_FinishedRequest(transfer, loose))
            self._held.add(request.request_id)
        for place, progress in enumerate(tracked.groups):
            for other in self._tracked.values() if progress.places else ():
                if not other.is_barred and not other.is_outdated and other.variant == tracked.variant:
                    other.groups[place].take_over(progress.places)
        return request.request_id in self._held

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
            assert tracked.first_tokens >= 0
            for progress in tracked.groups:
                assert 0 <= progress.saved
                assert all(progress.saved <= place for place in progress.places)
        for transfer in (*self._to_load, *(over.transfer for over in self._leaving)):
            assert 0 < len(transfer.blocks) == len(transfer.hashes)
        assert {over.transfer.request_id for over in self._leaving} <= self._held
        assert not self._held & self._tracked.keys()

    def _track(self, request: EngineRequest) -> _TrackedRequest:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _TrackedRequest(request, [_Progress() for _ in self._groups])
        return tracked

    def _step(
        self,
        tracked: _TrackedRequest,
        block_tables: Callable[[str], BlockTables | None],
        tokens: int,
        states: Sequence[tuple[int, int, int]],
    ) -> list[BlockTransfer]:
        """What is saved of a request, after which its blocks that this step computes are noted."""
        saves = self._unsaved(tracked)
        computed = tracked.request.num_computed_tokens + tokens
        ends = [computed // group.block_tokens for group in self._groups]
        is_noted = all(group.is_state or end <= of.noted for group, end, of in zip(self._groups, ends, tracked.groups, strict=True))
        has_windows = any(self._groups[transfer.group].window_tokens for transfer in saves)
        tables = block_tables(tracked.request.request_id) if has_windows or not is_noted else None
        saves = [kept for save in saves if (kept := self._without_lost(save, self._let_go(save, tables)))]
        for place, (group, end, progress) in enumerate(zip(self._groups, ends, tracked.groups, strict=True)):
            if tables is not None and not group.is_state:
                start = max(progress.saved, progress.noted)
                blocks = tables[place][start:end]
                progress.places.update(zip(range(start, start + len(blocks)), blocks, strict=True))
                progress.noted = start + len(blocks)
        for place, block, boundary in states:
            index, rest = divmod(boundary, self._groups[place].block_tokens)
            if not rest and index > tracked.groups[place].saved:
                tracked.groups[place].places[index - 1] = block
        return saves

    def _unsaved(self, tracked: _TrackedRequest) -> list[BlockTransfer]:
        """The blocks that are confirmed and have not been saved, which they count as from now on."""
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
                transfers.append(BlockTransfer(request.request_id, list(blocks.values()), names, parent, place, variant))
            progress.saved = max(progress.saved, end)
        return transfers

    def _let_go(self, transfer: BlockTransfer, tables: BlockTables | None) -> frozenset[int]:
        """Blocks of a running request that it has not any more: of a window which has moved on, or of a state that others have followed."""
        if tables is None or not self._groups[transfer.group].window_tokens:
            return frozenset()
        return frozenset(transfer.blocks).difference(tables[transfer.group])

    def _without_lost(self, transfer: BlockTransfer, loose: frozenset[int]) -> BlockTransfer | None:
        """`transfer` without those of the `loose` blocks, which the engine has let go, that cannot be copied any more."""
        lost = {block for block in loose if block in self._prepared or not self._is_whole(block)}
        if not lost:
            return transfer
        kept = [(block, name) for block, name in zip(transfer.blocks, transfer.hashes, strict=True) if block not in lost]
        if not kept:
            return None
        blocks, hashes = zip(*kept, strict=True)
        return replace(transfer, blocks=list(blocks), hashes=list(hashes))

    def _fail(self, tracked: _TrackedRequest, tokens: int) -> None:
        """Nothing of what is loaded after so many tokens came."""
        tracked.has_failed = True  # `loading` stays: another rank may tell in a later step of blocks before these
        for group, progress in zip(self._groups, tracked.groups, strict=True):
            progress.restart(min(progress.saved, tokens // group.block_tokens))

    def _hashes(self, request: EngineRequest, group: LayerGroup, start: int, end: int) -> list[bytes]:
        """Of blocks [start, end). A block's hash is that of the last part of it that vLLM hashes: it covers those before."""
        step = group.block_tokens // self._hash_block_tokens
        return [bytes(block) for block in request.block_hashes[(start + 1) * step - 1 : end * step : step]]
