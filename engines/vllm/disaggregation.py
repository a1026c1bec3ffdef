"""Prefill and decode on different engines: the prefill engine's reply, and how long a decode engine waits for blocks.

A prefill engine replies once its token is computed, and stores the last blocks after that. A decode engine that looks
them up at once would find only some and recompute the rest. Therefore `kv_transfer_params` states how many tokens to
expect. A request whose blocks are incomplete is scheduled later, while others run. It stops waiting after `wait_s`, or
at once if the store is unreachable, and computes what is missing.

Bookkeeping over vLLM's requests, without a store or a clock.
"""

from dataclasses import dataclass
from typing import Any, Final

from kvstore.engines.retention import FIELD
from kvstore.engines.vllm.plan import EngineRequest

REMOTE_DECODE: Final = "do_remote_decode"
REMOTE_PREFILL: Final = "do_remote_prefill"
"""vLLM's parameter names: the first is set for the prefill engine, the second for the decode engine."""
TOKENS: Final = "kvstore_tokens"
"""Prompt tokens whose blocks the prefill engine stores."""
POLL_S: Final = 0.005
"""Shortest interval between lookups of a waiting request. It does not slow down steps of other requests."""
POLL_GROWTH: Final = 0.25
"""Later intervals are this share of the time waited: about 25 lookups in 2 s. It lengthens the wait by at most that
share."""


@dataclass(slots=True)
class _Awaited:
    since_s: float
    next_s: float
    is_over: bool = False
    """All tokens were found once, or the time is over. The request does not wait again."""


class Disaggregation:
    """State of the decode requests that wait for blocks. One scheduler thread calls it; `now_s` is of any monotonic
    clock."""

    def __init__(self, block_tokens: int, *, wait_s: float, saves: bool) -> None:
        """Create it without requests. `saves`: this engine stores what it computes."""
        self._block_tokens = block_tokens
        self._wait_s = wait_s
        self._saves = saves
        self._awaited: dict[str, _Awaited] = {}

    def waits(self, request: EngineRequest, found_tokens: int, now_s: float, *, is_answered: bool) -> bool:
        """Return whether to schedule the request later: engine and store have less of it than its prefill engine
        stores.

        Args:
            found_tokens: tokens in the engine and in the store.
            is_answered: the store responds; if not, the wait ends.
        """
        expected = self._expected(request)
        if not expected:
            return False
        awaited = self._awaited.setdefault(request.request_id, _Awaited(now_s, now_s))
        waited_s = now_s - awaited.since_s
        awaited.is_over |= found_tokens >= expected or waited_s >= self._wait_s or not is_answered
        if now_s >= awaited.next_s:
            awaited.next_s = now_s + max(POLL_S, waited_s * POLL_GROWTH)
        return not awaited.is_over

    def next_lookup_s(self, request: EngineRequest) -> float:
        """Return when to look a waiting request up again."""
        return self._awaited[request.request_id].next_s

    def finished(self, request: EngineRequest, *, is_shared: bool = True) -> dict[str, Any] | None:
        """Forget the request. Return the decode engine's parameters if it was a prefill for another engine, else None.
        They include the client's retention hints, for the blocks of the answer.

        Args:
            is_shared: other engines can have the weights that computed it.
        """
        self._awaited.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        if not params.get(REMOTE_DECODE):
            return None
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        tokens = self._whole(computed) if self._saves and is_shared else 0
        hints = {FIELD: params[FIELD]} if FIELD in params else {}
        return {REMOTE_PREFILL: True, REMOTE_DECODE: False, TOKENS: tokens, **hints}

    @property
    def is_waiting(self) -> bool:
        """True if a request is deferred until its blocks are stored."""
        return any(not awaited.is_over for awaited in self._awaited.values())

    def _expected(self, request: EngineRequest) -> int:
        """Return the tokens of full blocks that the prefill engine stores, less the one token that every engine
        computes itself."""
        params = request.kv_transfer_params or {}
        told = params.get(TOKENS)
        if not params.get(REMOTE_PREFILL) or not isinstance(told, int):
            return 0
        return self._whole(max(0, min(told, request.num_tokens - 1)))

    def _whole(self, tokens: int) -> int:
        return tokens // self._block_tokens * self._block_tokens
