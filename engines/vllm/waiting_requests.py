"""Lookup results of the requests in vLLM's waiting queue: which are reused, and which the next lookup requests.
Sans-I/O.

In each step vLLM asks for the first waiting request, until it has blocks for it. A result is reused until it is
`interval_s` old; then one lookup refreshes all waiting requests with results as old.

A stale result costs hits but never gives wrong tokens. Blocks stored since the lookup are computed; a block evicted
since fails to load and vLLM recomputes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.client.tensors.groups import Present, longest
from kvstore.engines.vllm.identity import Variant
from kvstore.engines.vllm.plan import EngineRequest, LayerGroup, SchedulerPlan


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """Blocks of one request to look up."""

    request_id: str
    variant: Variant
    version: tuple[int, bytes, Variant | None]
    """Number of tokens, last block hash and variant. Results of another version are not reused."""
    start_tokens: int
    hashes: Sequence[Sequence[bytes]]
    """Block hashes of each group, from the block after `start_tokens` on."""

    @property
    def blocks(self) -> int:
        """Number of blocks of all groups."""
        return sum(map(len, self.hashes))


@dataclass(frozen=True, slots=True)
class FoundTokens:
    """Result for one request: tokens that the engine has, that were looked up, and that the store has."""

    computed_tokens: int = 0
    """Tokens that the engine has."""
    asked_tokens: int = 0
    """Tokens of full blocks that were looked up after those."""
    found_tokens: int = 0
    """Tokens after `computed_tokens` that the store has without a gap."""


@dataclass(slots=True)
class _WaitingLookup:
    """One waiting request with its last result."""

    request: EngineRequest
    lookup_request: LookupRequest | None = None
    """Last lookup with a result."""
    present: Sequence[Present] = ()
    due_s: float = 0.0
    found: FoundTokens = FoundTokens()
    """Result that was returned last."""


class WaitingRequests:
    """Results of all waiting requests. Scheduler's thread only; `now_s` is of any monotonic clock."""

    def __init__(self, groups: Sequence[LayerGroup], plan: SchedulerPlan, *, interval_s: float, batch_blocks: int) -> None:
        """Create it without requests.

        Args:
            interval_s: age from which a result is not reused.
            batch_blocks: maximum blocks of one lookup; the request that vLLM asks for is looked up whole in any case.
        """
        self._groups = groups
        self._plan = plan
        self._interval_s = interval_s
        self._batch_blocks = batch_blocks
        self._waiting: dict[str, _WaitingLookup] = {}

    def add(self, request: EngineRequest) -> None:
        """Add a waiting request. A no-op if it is known."""
        self._waiting.setdefault(request.request_id, _WaitingLookup(request))

    def remove(self, request_id: str) -> FoundTokens:
        """Remove a request and return its last result."""
        waiting = self._waiting.pop(request_id, None)
        return waiting.found if waiting is not None else FoundTokens()

    def lookup_requests(self, request: EngineRequest, computed_tokens: int, now_s: float) -> list[LookupRequest]:
        """Return what to look up before `found` can be called for `request`; [] if its result can be reused or it needs
        none.

        The first entry is of `request`. Requests with due results follow in queue order, up to `batch_blocks`.
        """
        self.add(request)
        waiting = self._waiting[request.request_id]
        if not self._plan.reads(request) or not self._is_due(waiting, computed_tokens, now_s):
            return []
        first = self._lookup_request(waiting, computed_tokens)
        if not all(first.hashes):
            return []
        lookup_requests, blocks = [first], first.blocks
        for other in self._waiting.values():
            if other is waiting or not self._plan.reads(other.request) or not self._is_due(other, None, now_s):
                continue
            lookup_request = self._lookup_request(other, None)
            blocks += lookup_request.blocks
            if blocks > self._batch_blocks:
                break
            if all(lookup_request.hashes):
                lookup_requests.append(lookup_request)
        return lookup_requests

    def record_results(self, lookup_requests: Sequence[LookupRequest], present: Sequence[Sequence[Present]], now_s: float) -> None:
        """Record a lookup's result: `present[i]` has, for each group, which blocks of `lookup_requests[i]` the store has."""
        for lookup_request, of_question in zip(lookup_requests, present, strict=True):
            waiting = self._waiting[lookup_request.request_id]
            waiting.lookup_request, waiting.present, waiting.due_s = lookup_request, of_question, now_s + self._interval_s

    def found(self, request: EngineRequest, computed_tokens: int) -> FoundTokens:
        """Return how many tokens after `computed_tokens` the last result has; none if the request was not looked up."""
        waiting = self._waiting[request.request_id]
        waiting.found = self._found(waiting, computed_tokens)
        return waiting.found

    def schedule_lookup(self, request_id: str, due_s: float) -> None:
        """Look the request up again at `due_s` at the latest."""
        waiting = self._waiting[request_id]
        waiting.due_s = min(waiting.due_s, due_s)

    def _is_due(self, waiting: _WaitingLookup, computed_tokens: int | None, now_s: float) -> bool:
        """Return whether the result is too old, of another version, or starts after the blocks that the engine has
        now."""
        lookup_request = waiting.lookup_request
        if lookup_request is None or now_s >= waiting.due_s or lookup_request.version != self._version(waiting.request):
            return True
        return computed_tokens is not None and computed_tokens < lookup_request.start_tokens

    def _found(self, waiting: _WaitingLookup, computed_tokens: int) -> FoundTokens:
        lookup_request = waiting.lookup_request
        if lookup_request is None or not self._plan.reads(waiting.request) or lookup_request.version != self._version(waiting.request):
            return FoundTokens(computed_tokens)
        starts = [lookup_request.start_tokens // group.block_tokens for group in self._groups]
        ends = [start + len(of_group) for start, of_group in zip(starts, waiting.present, strict=True)]
        limit = min(end * group.block_tokens for end, group in zip(ends, self._groups, strict=True))
        if not lookup_request.start_tokens <= computed_tokens < limit:
            return FoundTokens(computed_tokens)
        present = []
        for group, start, of_group in zip(self._groups, starts, waiting.present, strict=True):
            own = np.ones(computed_tokens // group.block_tokens, np.bool_)
            present.append(np.concatenate([own, of_group[len(own) - start :]]))
        end = longest(self._groups, present, limit_tokens=limit)
        return FoundTokens(computed_tokens, limit - computed_tokens, max(0, end - computed_tokens))

    def _lookup_request(self, waiting: _WaitingLookup, computed_tokens: int | None) -> LookupRequest:
        """Return the lookup from `computed_tokens` (None: unknown) or the last lookup's start. From 0 if the engine
        evicted blocks since, because it may evict more."""
        last = waiting.lookup_request
        if last is None:
            start = computed_tokens or 0
        else:
            start = 0 if computed_tokens is not None and computed_tokens < last.start_tokens else last.start_tokens
        request = waiting.request
        variant = self._plan.variant(request)
        assert variant is not None, "the plan reads it"
        return LookupRequest(request.request_id, variant, self._version(request), start, self._plan.missing_hashes(request, start))

    def _version(self, request: EngineRequest) -> tuple[int, bytes, Variant | None]:
        hashes = request.block_hashes
        return request.num_tokens, bytes(hashes[-1]) if hashes else b"", self._plan.variant(request)
