"""Prefill and decode by different engines: what the engine that computes a prompt says of it in `kv_transfer_params`, and how long the one
that goes on waits for blocks which are still on their way to the store. Bookkeeping over vLLM's requests, with no store and no clock in it.

The prefill engine answers once its token is made, and stores the last blocks after that: the decode engine, which is asked at once, would
find a part of them only, and compute the rest. So it is told how many tokens to expect, and a request whose blocks are not all there is
scheduled later, while others are computed. It computes what has not come when its time is over, and does not wait for a store that is away.
"""

from dataclasses import dataclass
from typing import Any, Final

from kvstore.engines.vllm.plan import EngineRequest

REMOTE_DECODE: Final = "do_remote_decode"
REMOTE_PREFILL: Final = "do_remote_prefill"
"""As vLLM and its proxies call them: what a prefill engine is told, and what it has the decode engine told."""
TOKENS: Final = "kvstore_tokens"
"""Those of the prompt whose blocks the prefill engine stores."""
POLL_S: Final = 0.005
"""Shortest time between two lookups of a request that waits for blocks. Steps of other requests do not get slower by it."""
POLL_GROWTH: Final = 0.25
"""Later lookups are this share of the time waited apart: about 25 in 2 s. The wait gets longer by as much at most."""


@dataclass(slots=True)
class _Awaited:
    since_s: float
    next_s: float
    is_over: bool = False
    """All of it was there once, or its time is over: what is missing now is not waited for again."""


class Disaggregation:
    """Of one scheduler, and used by its thread; `now_s` is of any clock that goes forwards."""

    def __init__(self, block_tokens: int, *, wait_s: float, saves: bool) -> None:
        """`saves`: this engine stores what it computes."""
        self._block_tokens = block_tokens
        self._wait_s = wait_s
        self._saves = saves
        self._awaited: dict[str, _Awaited] = {}

    def waits(self, request: EngineRequest, found_tokens: int, now_s: float, *, is_answered: bool) -> bool:
        """Whether to schedule it later: less of it is found, in the engine and in the store, than its prefill engine stores.

        Args:
            is_answered: the store can be asked; if not there is nothing to wait for.
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
        """When a request that waits is to be looked up again."""
        return self._awaited[request.request_id].next_s

    def finished(self, request: EngineRequest, *, is_shared: bool = True) -> dict[str, Any] | None:
        """The request is over: the parameters for whoever asked for a decode elsewhere, None for others.

        Args:
            is_shared: another engine can have the weights that computed it.
        """
        self._awaited.pop(request.request_id, None)
        if not (request.kv_transfer_params or {}).get(REMOTE_DECODE):
            return None
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        return {REMOTE_PREFILL: True, REMOTE_DECODE: False, TOKENS: self._whole(computed) if self._saves and is_shared else 0}

    @property
    def is_waiting(self) -> bool:
        """A request is scheduled later."""
        return any(not awaited.is_over for awaited in self._awaited.values())

    def _expected(self, request: EngineRequest) -> int:
        """The tokens of full blocks that its prefill engine stores. One token at least an engine computes itself."""
        params = request.kv_transfer_params or {}
        told = params.get(TOKENS)
        if not params.get(REMOTE_PREFILL) or not isinstance(told, int):
            return 0
        return self._whole(max(0, min(told, request.num_tokens - 1)))

    def _whole(self, tokens: int) -> int:
        return tokens // self._block_tokens * self._block_tokens
