"""Lookups of the scheduler: how many tokens of a prompt the store has, for all ranks and groups of layers.

- **Batching.** One message looks up all waiting requests that are due (waiting_requests.py), within a deadline. While
  the store is unreachable, the result comes at once from the shared memory of local nodes: see `Jobs`.
- **Holds.** One lookup takes one hold for all its requests. The hold is released with the last of them: when its load
  is over, when vLLM admits it without a load, when it ends, or when a later lookup holds its blocks.
- **Counters.** A request counts once, when vLLM first admits it, as in vLLM's own prefix cache statistics. Requests
  aborted in the queue, loads after a preemption and retries after a failed load do not count.

Errors of the store are never raised. The scheduler's thread makes all calls.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np

from kvstore.client.holds import Hold, new_hold
from kvstore.client.jobs.circuit_breaker import CircuitState
from kvstore.client.jobs.jobs import Jobs
from kvstore.client.tensors.groups import Present
from kvstore.engines.vllm.counters import ConnectorCounters
from kvstore.engines.vllm.identity import Shard
from kvstore.engines.vllm.plan import EngineRequest, LayerGroup, SchedulerPlan
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.engines.vllm.waiting_requests import FoundTokens, LookupRequest, WaitingRequests

CONNECT_S: Final = 5.0
"""Deadline of the first lookup, at engine start."""
INTERVAL_S: Final = 1.0
"""Age after which a result is not reused. All waiting requests are then looked up again in one message."""
HOLD_S: Final = 10.0
"""Duration of a hold, unless its requests are loaded or over sooner. Covers the time to the next lookup, and the
load."""
MAX_BATCH_KEYS: Final = 8192
"""Keys of one lookup: about 4 ms of the scheduler's thread. A later lookup takes the other waiting requests."""


class StoreLookup:
    """Looks up waiting requests in the store. The scheduler's thread calls it and blocks at most `lookup_deadline_s`
    a message."""

    def __init__(
        self, jobs: Jobs, groups: Sequence[LayerGroup], shards: Sequence[Sequence[Shard]], plan: SchedulerPlan, settings: VllmSettings
    ) -> None:
        """Create it without waiting requests. `shards`: those of all ranks for each group; a block is present if
        every shard has it."""
        self._jobs = jobs
        self._shards = shards
        self._deadline_s = settings.lookup_deadline_s
        self._holds = RequestHolds()
        batch_blocks = MAX_BATCH_KEYS // max(map(len, shards))
        self.waiting = WaitingRequests(groups, plan, interval_s=INTERVAL_S, batch_blocks=batch_blocks)
        self.hits = HitCounter(groups[0].block_tokens)
        self._counters = ConnectorCounters()
        self._loading: set[str] = set()

    def connect(self) -> None:
        """Send one lookup, so that no request waits for the connection. Blocks at most CONNECT_S. Errors are
        ignored."""
        self._jobs.exists([shard.key(b"") for shard in self._shards[0][:1]], deadline_s=CONNECT_S)

    def find(self, request: EngineRequest, computed_tokens: int, now_s: float) -> FoundTokens:
        """Return how many tokens after `computed_tokens` can be loaded; none if the store does not respond in time.

        The number is a multiple of every group's block. A result younger than INTERVAL_S is reused. `now_s` is of
        time.monotonic.
        """
        if lookup_requests := self.waiting.lookup_requests(request, computed_tokens, now_s):
            begin_s = time.monotonic()
            hold = new_hold(HOLD_S)
            self.waiting.record_results(lookup_requests, self._ask(lookup_requests, hold), now_s)
            self._release(self._holds.take(hold, [lookup_request.request_id for lookup_request in lookup_requests]))
            self._counters.add(ConnectorCounters(lookups=1, lookup_s=time.monotonic() - begin_s))
        return self.waiting.found(request, computed_tokens)

    def admitted(self, request_id: str, table: Sequence[int], external_tokens: int) -> None:
        """vLLM allocated `table` (first group) for the request and loads `external_tokens`. Releases the hold if
        nothing is loaded."""
        self.hits.admitted(request_id, self.waiting.remove(request_id), table, external_tokens)
        if external_tokens:
            self._loading.add(request_id)
        elif request_id not in self._loading:
            self._release(self._holds.end([request_id]))

    def loaded(self, request_ids: Iterable[str]) -> None:
        """The loads of these requests ended."""
        requests = list(request_ids)
        self._loading.difference_update(requests)
        self.hits.loaded(requests)
        self._release(self._holds.end(requests))

    def ended(self, request_id: str) -> None:
        """The request finished or was aborted."""
        self.waiting.remove(request_id)
        self.hits.ended(request_id)
        self._loading.discard(request_id)
        self._release(self._holds.end([request_id]))

    def take_counters(self) -> ConnectorCounters:
        """Return the counters since the last call."""
        counters = self._counters.take()
        counters.add(self.hits.counters.take())
        return counters

    @property
    def is_reachable(self) -> bool:
        """True if the circuit breaker of reads is closed."""
        return self._jobs.stats().reads.state is CircuitState.CLOSED

    def _release(self, holds: Iterable[Hold]) -> None:
        for hold in holds:
            self._jobs.release(hold)

    def _ask(self, lookup_requests: Sequence[LookupRequest], hold: Hold) -> list[list[Present]]:
        """Send one lookup of all `lookup_requests`. Return, for each of them and each group, which blocks all ranks have.
        `hold` protects the blocks."""
        keys = [
            shard.of(lookup_request.variant).keys(hashes)
            for lookup_request in lookup_requests
            for hashes, of_group in zip(lookup_request.hashes, self._shards, strict=True)
            for shard in of_group
        ]
        found = self._jobs.exists(list(chain.from_iterable(keys)), hold=hold, deadline_s=self._deadline_s)
        flags = np.array(found, np.bool_)
        answers: list[list[Present]] = []
        for lookup_request in lookup_requests:
            present: list[Present] = []
            for hashes, of_group in zip(lookup_request.hashes, self._shards, strict=True):
                of_ranks, flags = np.split(flags, [len(of_group) * len(hashes)])
                present.append(np.all(of_ranks.reshape(-1, len(hashes)), axis=0))
            answers.append(present)
        return answers


class RequestHolds:
    """Reference counts of holds by request. Scheduler's thread only."""

    def __init__(self) -> None:
        self._by_request: dict[str, Hold] = {}
        self._users: dict[Hold, int] = {}

    def take(self, hold: Hold, request_ids: Iterable[str]) -> list[Hold]:
        """Record that a lookup of these requests took `hold`. Return the earlier holds that no request uses any
        more."""
        requests = list(request_ids)
        self._users[hold] = len(requests)
        earlier = [self._by_request[request_id] for request_id in requests if request_id in self._by_request]
        self._by_request.update(dict.fromkeys(requests, hold))
        return [over for over in earlier if self._drop(over)]

    def end(self, request_ids: Iterable[str]) -> list[Hold]:
        """Drop the holds of these requests. Return those that no request uses any more. Unknown requests are
        ignored."""
        holds = [self._by_request.pop(request_id) for request_id in request_ids if request_id in self._by_request]
        return [hold for hold in holds if self._drop(hold)]

    def _drop(self, hold: Hold) -> bool:
        """Remove one reference; return whether it was the last."""
        self._users[hold] -= 1
        if self._users[hold]:
            return False
        del self._users[hold]
        return True


@dataclass(slots=True)
class _Load:
    tokens: int
    """Leading tokens that no rank has failed to load so far."""
    blocks: Sequence[int]
    """Pool blocks in token order."""


class HitCounter:
    """Counts requests, queried, found and loaded tokens. Scheduler's thread only."""

    def __init__(self, block_tokens: int) -> None:
        """Start at zero. `block_tokens` is of the first group of layers."""
        self._block_tokens = block_tokens
        self._counted: set[str] = set()
        self._loads: dict[str, _Load] = {}
        self.counters = ConnectorCounters()

    def admitted(self, request_id: str, found: FoundTokens, table: Sequence[int], external_tokens: int) -> None:
        """vLLM allocated `table` (first group) for the request and loads `external_tokens` after the tokens that it
        had."""
        if not found.asked_tokens or request_id in self._counted:
            return
        self._counted.add(request_id)
        self.counters.add(ConnectorCounters(requests=1, queried_tokens=found.asked_tokens, found_tokens=found.found_tokens))
        if external_tokens:
            start = found.computed_tokens // self._block_tokens
            stop = (found.computed_tokens + external_tokens) // self._block_tokens
            self._loads[request_id] = _Load(external_tokens, table[start:stop])

    def failed(self, block_ids: Collection[int], request_ids: Iterable[str]) -> None:
        """These pool blocks were not loaded, and nothing of these requests was."""
        for request_id in request_ids:
            self._loads.pop(request_id, None)
        for load in self._loads.values() if block_ids else ():
            first = next((place for place, block in enumerate(load.blocks) if block in block_ids), None)
            if first is not None:
                load.tokens = min(load.tokens, first * self._block_tokens)

    def loaded(self, request_ids: Iterable[str]) -> None:
        """The loads of these requests ended: count their tokens."""
        for request_id in request_ids:
            if (load := self._loads.pop(request_id, None)) is not None:
                self.counters.add(ConnectorCounters(loaded_tokens=load.tokens))

    def ended(self, request_id: str) -> None:
        """Forget the request. Its unfinished load is not counted."""
        self._counted.discard(request_id)
        self._loads.pop(request_id, None)
