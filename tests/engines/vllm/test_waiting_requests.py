"""Results of lookups: reused while fresh, asked again for all waiting requests at once, and never trusted beyond what they cover."""

import numpy as np

from kvstore.engines.vllm.identity import Variant
from kvstore.engines.vllm.plan import LayerGroup, SchedulerPlan
from kvstore.engines.vllm.waiting_requests import FoundTokens, LookupRequest, WaitingRequests
from tests.engines.vllm.requests import BLOCK_TOKENS, FakeRequest

PROMPT = 4 * BLOCK_TOKENS + 1
INTERVAL_S = 1.0
BATCH_BLOCKS = 100


class Store:
    """Answers questions from the first `stored` blocks of each request, and counts them."""

    def __init__(self) -> None:
        self.weights = ""
        self.stored = 3
        groups = [LayerGroup(BLOCK_TOKENS)]
        self.plan = SchedulerPlan(
            groups, hash_block_tokens=BLOCK_TOKENS, is_whole=lambda block: True, variant=lambda request: Variant(self.weights)
        )
        self.waiting = WaitingRequests(groups, self.plan, interval_s=INTERVAL_S, batch_blocks=BATCH_BLOCKS)
        self.messages: list[list[LookupRequest]] = []

    def find(self, request: FakeRequest, computed: int = 0, at_s: float = 0.0) -> FoundTokens:
        if lookup_requests := self.waiting.lookup_requests(request, computed * BLOCK_TOKENS, at_s):
            self.messages.append(lookup_requests)
            self.waiting.record_results(lookup_requests, [self._present(lookup_request) for lookup_request in lookup_requests], at_s)
        return self.waiting.found(request, computed * BLOCK_TOKENS)

    def _present(self, lookup_request: LookupRequest) -> list[np.ndarray]:
        first = lookup_request.start_tokens // BLOCK_TOKENS
        return [np.arange(first, first + len(hashes)) < self.stored for hashes in lookup_request.hashes]

    @property
    def asked(self) -> list[list[str]]:
        return [[lookup_request.request_id for lookup_request in message] for message in self.messages]


def request(name: str = "a", tokens: int = PROMPT) -> FakeRequest:
    return FakeRequest(name, tokens, text=name)


def found(computed: int, asked: int, found: int) -> FoundTokens:
    return FoundTokens(computed * BLOCK_TOKENS, asked * BLOCK_TOKENS, found * BLOCK_TOKENS)


def test_result_is_reused_for_the_interval() -> None:
    """A request in the queue is asked for in each step, and looked up 1 + waiting time / interval times."""
    store, waits = Store(), request()
    for step in range(300):
        assert store.find(waits, at_s=step / 100) == found(0, 4, 3)
    assert len(store.messages) == 3


def test_one_lookup_asks_for_all_that_are_due() -> None:
    store, first, second, third = Store(), request("a"), request("b"), request("c")
    for waits in (first, second):
        store.waiting.add(waits)
    store.find(first, at_s=0)
    assert store.find(second, at_s=0.9) == found(0, 4, 3)
    assert store.find(third, at_s=0.5) == found(0, 4, 3)
    store.find(second, at_s=1.2)
    assert store.asked == [["a", "b"], ["c"], ["b", "a"]], "c is fresh"
    store.waiting.remove("a")
    store.find(second, at_s=3)
    assert store.asked[-1] == ["b", "c"]


def test_lookup_is_bounded() -> None:
    """Requests that vLLM did not ask for are left to a later lookup."""
    store, large = Store(), (BATCH_BLOCKS - 4) * BLOCK_TOKENS + 1
    for waits in (request("a"), request("b", large), request("c")):
        store.waiting.add(waits)
    store.find(request("a"))
    assert store.asked == [["a", "b"]]
    store.find(request("d", 2 * large))
    assert store.asked[1:] == [["d"]]


def test_more_computed_tokens_reuse_a_result() -> None:
    store, waits = Store(), request()
    store.find(waits)
    assert store.find(waits, computed=2) == found(2, 2, 1)
    assert store.find(waits, computed=3) == found(3, 1, 0)
    assert store.find(waits, computed=4) == found(4, 0, 0)
    assert len(store.messages) == 1


def test_fewer_computed_tokens_are_looked_up_once() -> None:
    """vLLM's own cache lost blocks while the request waited: from then on the lookup begins at the first block."""
    store, waits = Store(), request()
    assert store.find(waits, computed=3) == found(3, 1, 0)
    assert store.find(waits, computed=2) == found(2, 2, 1)
    assert store.find(waits, computed=0) == found(0, 4, 3)
    assert [message[0].start_tokens for message in store.messages] == [3 * BLOCK_TOKENS, 0]
    store.find(waits, computed=2, at_s=2)
    assert store.messages[-1][0].start_tokens == 0


def test_another_request_is_looked_up_from_where_it_was() -> None:
    store, first, second = Store(), request("a"), request("b")
    store.find(second, computed=2)
    store.find(first, at_s=2)
    assert [lookup_request.start_tokens for lookup_request in store.messages[-1]] == [0, 2 * BLOCK_TOKENS]


def test_result_of_other_tokens_or_weights_is_not_reused() -> None:
    store, waits = Store(), request()
    store.find(waits)
    waits.num_tokens += BLOCK_TOKENS
    assert store.waiting.found(waits, 0) == FoundTokens()
    assert store.find(waits) == found(0, 5, 3)
    store.weights = "new"
    store.find(waits)
    assert [message[0].variant.weights for message in store.messages] == ["", "", "new"]


def test_request_that_may_not_be_read_is_not_looked_up() -> None:
    """Its load failed, or the engine is paused: not even a result that is fresh is used."""
    store, first, second = Store(), request("a"), request("b")
    store.find(first)
    store.plan.failed_requests(["a"])
    assert store.find(first) == FoundTokens()
    store.find(second, at_s=2)
    assert store.asked == [["a"], ["b"]]


def test_request_without_a_full_block_is_not_looked_up() -> None:
    store, short = Store(), request("short", BLOCK_TOKENS)
    store.waiting.add(request("none", 0))
    assert store.find(short) == FoundTokens()
    store.find(request("b"))
    assert store.asked == [["b"]]


def test_request_is_asked_again_earlier() -> None:
    """One that waits for blocks which another engine is storing."""
    store, waits = Store(), request()
    store.find(waits)
    store.waiting.schedule_lookup("a", 0.5)
    store.waiting.schedule_lookup("a", 5.0)
    store.find(waits, at_s=0.4)
    assert len(store.messages) == 1
    store.stored = 4
    assert store.find(waits, at_s=0.5) == found(0, 4, 4)


def test_removed_request_returns_its_last_result() -> None:
    store, waits = Store(), request()
    store.find(waits, computed=1)
    assert store.waiting.remove("a") == found(1, 3, 2)
    assert store.waiting.remove("a") == FoundTokens()
    store.find(waits)
    assert len(store.messages) == 2, "it was preempted"
