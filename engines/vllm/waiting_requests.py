"""Lookup results of the requests in vLLM's waiting queue: which are reused, and which requests the next lookup asks for. Sans-I/O.

vLLM asks for the first waiting request in each step until it has blocks for it. A result is reused until it is `interval_s` old. Then one
lookup asks again, for all waiting requests whose results are as old. A stale result costs hits, never wrong tokens: blocks stored since
are computed, and a block evicted since fails to load, which vLLM recomputes.
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
    """The request's tokens, their last hash and the variant: a result of another version is not reused."""
    start_tokens: int
    hashes: Sequence[Sequence[bytes]]
    """Of each group, from the block after `start_tokens` on."""

    @property
    def blocks(self) -> int:
        """Blocks of all groups."""
        return sum(map(len, self.hashes))


@dataclass(frozen=True, slots=True)
class FoundTokens:
    """Tokens of a request after those that the engine has."""

    computed_tokens: int = 0
    """Those that the engine has."""
    asked_tokens: int = 0
    """Tokens of full blocks that the store may have."""
    found_tokens: int = 0
    """Tokens that it has, from the first on without a gap."""


@dataclass(slots=True)
class _WaitingLookup:
    request: EngineRequest
    question: LookupRequest | None = None
    """The last one that was answered."""
    present: Sequence[Present] = ()
    due_s: float = 0.0
    found: FoundTokens = FoundTokens()
    """As returned last."""


class WaitingRequests:
    """Used by the scheduler's thread. `now_s` is of any monotonic clock."""

    def __init__(self, groups: Sequence[LayerGroup], plan: SchedulerPlan, *, interval_s: float, batch_blocks: int) -> None:
        """`interval_s` is the age in seconds from which a result is not reused. `batch_blocks` bounds the blocks of one
        lookup, unless the request that vLLM asks for has more."""
        self._groups = groups
        self._plan = plan
        self._interval_s = interval_s
        self._batch_blocks = batch_blocks
        self._waiting: dict[str, _WaitingLookup] = {}

    def add(self, request: EngineRequest) -> None:
        """A request waits. A no-op if it is known."""
        self._waiting.setdefault(request.request_id, _WaitingLookup(request))

    def remove(self, request_id: str) -> FoundTokens:
        """The request waits no longer: return what was found last."""
        waiting = self._waiting.pop(request_id, None)
        return waiting.found if waiting is not None else FoundTokens()

    def questions(self, request: EngineRequest, computed_tokens: int, now_s: float) -> list[LookupRequest]:
        """Return what to look up before `found` can be called for `request`; [] if its result can be reused, or none is needed.

        The first question is of `request`. Those of other requests whose results are due follow, oldest first, up to `batch_blocks`.
        """
        self.add(request)
        waiting = self._waiting[request.request_id]
        if not self._plan.reads(request) or not self._is_due(waiting, computed_tokens, now_s):
            return []
        first = self._question(waiting, computed_tokens)
        if not all(first.hashes):
            return []
        questions, blocks = [first], first.blocks
        for other in self._waiting.values():
            if other is waiting or not self._plan.reads(other.request) or not self._is_due(other, None, now_s):
                continue
            question = self._question(other, None)
            blocks += question.blocks
            if blocks > self._batch_blocks:
                break
            if all(question.hashes):
                questions.append(question)
        return questions

    def answered(self, questions: Sequence[LookupRequest], present: Sequence[Sequence[Present]], now_s: float) -> None:
        """The store answered: `present[i]` has, of each group, which blocks of `questions[i]` it has."""
        for question, of_question in zip(questions, present, strict=True):
            waiting = self._waiting[question.request_id]
            waiting.question, waiting.present, waiting.due_s = question, of_question, now_s + self._interval_s

    def found(self, request: EngineRequest, computed_tokens: int) -> FoundTokens:
        """Return how many tokens after `computed_tokens` the last result has; none if the request was not looked up."""
        waiting = self._waiting[request.request_id]
        waiting.found = self._found(waiting, computed_tokens)
        return waiting.found

    def ask_again(self, request_id: str, due_s: float) -> None:
        """Have the request looked up again at `due_s`, if its result is reused longer."""
        waiting = self._waiting[request_id]
        waiting.due_s = min(waiting.due_s, due_s)

    def _is_due(self, waiting: _WaitingLookup, computed_tokens: int | None, now_s: float) -> bool:
        """Whether the result is too old, of another version, or of fewer blocks than the engine lacks now."""
        question = waiting.question
        if question is None or now_s >= waiting.due_s or question.version != self._version(waiting.request):
            return True
        return computed_tokens is not None and computed_tokens < question.start_tokens

    def _found(self, waiting: _WaitingLookup, computed_tokens: int) -> FoundTokens:
        question = waiting.question
        if question is None or not self._plan.reads(waiting.request) or question.version != self._version(waiting.request):
            return FoundTokens(computed_tokens)
        starts = [question.start_tokens // group.block_tokens for group in self._groups]
        ends = [start + len(of_group) for start, of_group in zip(starts, waiting.present, strict=True)]
        limit = min(end * group.block_tokens for end, group in zip(ends, self._groups, strict=True))
        if not question.start_tokens <= computed_tokens < limit:
            return FoundTokens(computed_tokens)
        present = []
        for group, start, of_group in zip(self._groups, starts, waiting.present, strict=True):
            own = np.ones(computed_tokens // group.block_tokens, np.bool_)
            present.append(np.concatenate([own, of_group[len(own) - start :]]))
        end = longest(self._groups, present, limit_tokens=limit)
        return FoundTokens(computed_tokens, limit - computed_tokens, max(0, end - computed_tokens))

    def _question(self, waiting: _WaitingLookup, computed_tokens: int | None) -> LookupRequest:
        """From `computed_tokens` (None: unknown), or where the last one began, or 0 if the engine lost blocks since: it may lose more."""
        last = waiting.question
        if last is None:
            start = computed_tokens or 0
        else:
            start = 0 if computed_tokens is not None and computed_tokens < last.start_tokens else last.start_tokens
        request = waiting.request
        variant = self._plan.variant(request)
        assert variant is not None, "the plan reads it"
        return LookupRequest(request.request_id, variant, self._version(request), start, self._plan.wanted(request, start))

    def _version(self, request: EngineRequest) -> tuple[int, bytes, Variant | None]:
        hashes = request.block_hashes
        return request.num_tokens, bytes(hashes[-1]) if hashes else b"", self._plan.variant(request)
