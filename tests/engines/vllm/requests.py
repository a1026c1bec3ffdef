"""Fake scheduler of an engine, as a plan sees it: requests whose tokens a test computes, and their blocks."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.engines.vllm.plan import SchedulerPlan, StepPlan

BLOCK_TOKENS = 4


@dataclass
class FakeRequest:
    """As vLLM's `Request`: a prompt of `num_tokens` named by its hashes."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    text: str = ""
    hash_tokens: int = BLOCK_TOKENS
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def block_hashes(self) -> Sequence[bytes]:
        return [block_hash(index, self.text) for index in range(self.num_tokens // self.hash_tokens)]


def block_hash(index: int, text: str = "") -> bytes:
    return f"{text}{index}".encode()


def hashes(indices: Iterable[int], text: str = "") -> list[bytes]:
    return [block_hash(index, text) for index in indices]


@dataclass
class FakeScheduler:
    """Runs requests through a plan, a step at a time, as vLLM's scheduler does."""

    plan: SchedulerPlan
    groups: int = 1
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    next_block: int = 100
    states: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Told with the next step."""

    def admit(self, request: FakeRequest, *, local: int = 0, stored: int = 0) -> list[bytes]:
        """It has `local` blocks itself, the store `stored` more; what was asked for, of the first group."""
        computed = local * BLOCK_TOKENS
        missing_hashes = self.plan.missing_hashes(request, computed)
        tokens = min(stored, len(missing_hashes[0])) * BLOCK_TOKENS
        self.plan.found(request, computed)
        count = -(-request.num_tokens // BLOCK_TOKENS)
        self.tables[request.request_id] = []
        for _ in range(self.groups):
            self.tables[request.request_id].append(list(range(self.next_block, self.next_block + count)))
            self.next_block += count
        self.plan.allocated(request, self.tables[request.request_id], tokens)
        request.num_computed_tokens = computed + tokens
        return missing_hashes[0]

    def admitted(self, request: FakeRequest, *, local: int = 0, stored: int = 0) -> FakeRequest:
        self.admit(request, local=local, stored=stored)
        return request

    def admit_sharing(self, request: FakeRequest, owner: FakeRequest, *, blocks: int) -> None:
        """It has the first `blocks` of `owner`, which vLLM shares from the moment that it has given them out."""
        self.plan.missing_hashes(request, blocks * BLOCK_TOKENS)
        self.plan.found(request, blocks * BLOCK_TOKENS)
        count = -(-request.num_tokens // BLOCK_TOKENS) - blocks
        own = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        self.tables[request.request_id] = [self.tables[owner.request_id][0][:blocks] + own]
        self.plan.allocated(request, self.tables[request.request_id], 0)
        request.num_computed_tokens = blocks * BLOCK_TOKENS

    def step(self, *scheduled: FakeRequest, tokens: int = 0, prepared: Collection[int] = ()) -> StepPlan:
        """Plans a step in which each request computes `tokens`; their outcome is not seen until `land`."""
        states, self.states = self.states, {}
        counts = {request.request_id: tokens for request in scheduled}
        plan = self.plan.step(self.tables.get, counts, states, is_idle=not scheduled, prepared=prepared)
        for request in scheduled:
            request.num_computed_tokens += tokens
            request.num_in_flight_tokens += tokens
        self.plan.check_integrity()
        return plan

    def run(self, *requests: FakeRequest, tokens: int) -> None:
        """A step of which the outcome is seen."""
        self.step(*requests, tokens=tokens)
        self.land(*requests)

    def land(self, *requests: FakeRequest) -> None:
        for request in requests:
            request.num_in_flight_tokens = 0

    def finish(self, request: FakeRequest) -> bool:
        keeps = self.plan.finished(request, self.tables[request.request_id])
        self.plan.check_integrity()
        return keeps
