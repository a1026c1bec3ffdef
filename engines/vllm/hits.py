"""Counts of requests and of their prompt tokens: looked up, found, loaded. Each request counts once. Sans-I/O.

A request counts when vLLM first admits it, as in vLLM's own prefix cache statistics: one that is aborted in the queue does not. What a
request loads again after a preemption, and its retry after a failed load, do not count.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvstore.engines.vllm.counters import Counters
from kvstore.engines.vllm.waiting_requests import Found


@dataclass(slots=True)
class _Load:
    tokens: int
    """Those that no rank has failed to load."""
    blocks: Sequence[int]
    """Of the engine's pool, in the order of the tokens."""


class HitCounter:
    """Used by the scheduler's thread."""

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens` is of the first group of layers."""
        self._block_tokens = block_tokens
        self._counted: set[str] = set()
        self._loads: dict[str, _Load] = {}
        self.counters = Counters()

    def admitted(self, request_id: str, found: Found, table: Sequence[int], external_tokens: int) -> None:
        """vLLM gave the request the blocks `table`, of the first group, and loads `external_tokens` after those that it had."""
        if not found.asked_tokens or request_id in self._counted:
            return
        self._counted.add(request_id)
        self.counters.add(Counters(requests=1, queried_tokens=found.asked_tokens, found_tokens=found.found_tokens))
        if external_tokens:
            start = found.computed_tokens // self._block_tokens
            stop = (found.computed_tokens + external_tokens) // self._block_tokens
            self._loads[request_id] = _Load(external_tokens, table[start:stop])

    def failed(self, block_ids: Collection[int], request_ids: Iterable[str]) -> None:
        """These blocks of the pool were not loaded, and nothing of these requests."""
        for request_id in request_ids:
            self._loads.pop(request_id, None)
        for load in self._loads.values() if block_ids else ():
            first = next((place for place, block in enumerate(load.blocks) if block in block_ids), None)
            if first is not None:
                load.tokens = min(load.tokens, first * self._block_tokens)

    def loaded(self, request_ids: Iterable[str]) -> None:
        """The loads of these requests are over."""
        for request_id in request_ids:
            if (load := self._loads.pop(request_id, None)) is not None:
                self.counters.add(Counters(loaded_tokens=load.tokens))

    def ended(self, request_id: str) -> None:
        """The request is over; a load of it that was not is not counted."""
        self._counted.discard(request_id)
        self._loads.pop(request_id, None)
