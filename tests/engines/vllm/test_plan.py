"""What steps load and save, without an engine: blocks are saved once, when they are confirmed, and never on top of what did not come."""

import pytest

from kvstore.engines.vllm.plan import Plan, StepPlan, Transfer
from tests.engines.vllm.requests import BLOCK_TOKENS, FakeRequest, FakeScheduler, block_hash, hashes


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler(Plan(BLOCK_TOKENS, hash_block_tokens=BLOCK_TOKENS))


def saved(plan: StepPlan) -> list[bytes]:
    return [block for transfer in plan.saves for block in transfer.hashes]


def test_all_but_the_last_token_is_looked_for(scheduler: FakeScheduler) -> None:
    assert scheduler.admit(FakeRequest("a", 12)) == hashes(range(2))
    assert scheduler.admit(FakeRequest("b", 13)) == hashes(range(3))
    assert scheduler.admit(FakeRequest("c", 3)) == []


def test_what_the_engine_has_is_not_looked_for(scheduler: FakeScheduler) -> None:
    assert scheduler.admit(FakeRequest("a", 13), local=2) == hashes([2])
    assert scheduler.admit(FakeRequest("b", 13), local=3) == []


def test_what_the_store_has_is_loaded_into_the_blocks_after_the_engine_s_own(scheduler: FakeScheduler) -> None:
    scheduler.admit(FakeRequest("a", 17), local=1, stored=2)
    plan = scheduler.step()
    assert plan.loads == [Transfer("a", [101, 102], hashes([1, 2]))]
    assert plan.is_idle
    assert scheduler.step().loads == []


def test_an_engine_that_takes_none_of_what_was_found_loads_nothing(scheduler: FakeScheduler) -> None:
    request = FakeRequest("a", 17)
    scheduler.plan.wanted(request, 4)
    scheduler.plan.found(request, 4, 2)
    scheduler.plan.allocated(request, [1, 2, 3, 4, 5], 0)
    request.num_computed_tokens = 16
    scheduler.tables["a"] = [1, 2, 3, 4, 5]
    plan = scheduler.step(request)
    assert not plan.loads
    assert saved(plan) == hashes([1, 2, 3])


def test_blocks_are_saved_by_the_step_after_the_one_whose_outcome_is_known(scheduler: FakeScheduler) -> None:
    request = FakeRequest("a", 12)
    scheduler.admit(request)
    assert scheduler.step(request, tokens=8).saves == []
    assert scheduler.step(request, tokens=4).saves == [], "the first step is still on its way"
    scheduler.land(request)
    assert scheduler.step(request).saves == [Transfer("a", [100, 101, 102], hashes(range(3)))]
    assert scheduler.step(request).saves == []


def test_the_block_before_is_named(scheduler: FakeScheduler) -> None:
    request = FakeRequest("a", 12)
    scheduler.admit(request, local=1, stored=1)
    scheduler.step(request, tokens=4)
    scheduler.land(request)
    assert scheduler.step(request).saves == [Transfer("a", [102], hashes([2]), block_hash(1))]


def test_blocks_whose_tokens_are_not_certain_are_not_saved(scheduler: FakeScheduler) -> None:
    request = FakeRequest("a", 7, num_computed_tokens=0)
    scheduler.admit(request)
    scheduler.tables["a"].append(999)
    scheduler.step(request, tokens=9)  # of which some are guesses
    scheduler.land(request)
    assert saved(scheduler.step(request)) == hashes([0])
    request.num_tokens = 8
    assert saved(scheduler.step(request)) == hashes([1])


def test_what_came_from_the_store_is_not_saved(scheduler: FakeScheduler) -> None:
    request = FakeRequest("a", 13)
    scheduler.admit(request, stored=3)
    scheduler.step(request, tokens=1)
    scheduler.land(request)
    assert scheduler.step(request).saves == []


def test_blocks_that_did_not_come_are_saved_again_once_they_are_computed(scheduler: FakeScheduler) -> None:
    request, other = FakeRequest("a", 17), FakeRequest("b", 17, text="b")
    scheduler.admit(request, stored=4)
    scheduler.admit(other, stored=4)
    scheduler.step(request, other, tokens=1)
    scheduler.plan.failed([101])
    scheduler.plan.failed([])
    scheduler.land(request, other)
    request.num_computed_tokens = BLOCK_TOKENS  # vLLM takes back what stood on block 101
    assert scheduler.step(request, other, tokens=13).saves == []
    scheduler.land(request, other)
    assert saved(scheduler.step(request, other)) == hashes([1, 2, 3])


def test_the_store_is_not_believed_again_by_a_request_that_it_failed(scheduler: FakeScheduler) -> None:
    request = FakeRequest("a", 9)
    scheduler.admit(request, stored=2)
    scheduler.step()
    scheduler.plan.failed([100])
    assert scheduler.admit(request, stored=2) == [], "else it would be asked for the same blocks for ever"
    assert scheduler.step().loads == []


def test_a_failure_of_a_block_that_has_been_given_to_others_is_not_a_request_s(scheduler: FakeScheduler) -> None:
    request = FakeRequest("a", 13)
    scheduler.admit(request, stored=2)
    scheduler.step()
    scheduler.plan.allocated(request, scheduler.tables["a"], 0)  # the load is over
    scheduler.plan.failed([100])
    assert scheduler.plan.wanted(request, 0) == hashes(range(3))


def test_what_is_confirmed_by_the_last_step_is_saved_by_the_next_and_kept_until_then(scheduler: FakeScheduler) -> None:
    request = FakeRequest("a", 9)
    scheduler.admit(request)
    scheduler.step(request, tokens=9)
    scheduler.land(request)
    assert scheduler.finish(request)
    assert scheduler.plan.is_holding
    plan = scheduler.step()
    assert plan.saves == [Transfer("a", [100, 101], hashes(range(2)))]
    assert plan.finishing == ["a"]
    scheduler.plan.released(["a"])
    assert not scheduler.plan.is_holding
    assert scheduler.step().saves == []


def test_a_request_that_is_over_with_nothing_to_save_is_let_go(scheduler: FakeScheduler) -> None:
    request = FakeRequest("a", 9)
    scheduler.admit(request, stored=2)
    assert not scheduler.finish(request), "it was aborted while its blocks came"
    assert not scheduler.finish(request), "nothing is known of it"


def test_blocks_found_when_a_preempted_request_goes_on_are_not_saved_while_they_may_still_be_on_their_way(scheduler: FakeScheduler) -> None:
    request = FakeRequest("a", 13)
    scheduler.admit(request)
    scheduler.step(request, tokens=8)
    scheduler.land(request)
    request.num_computed_tokens = 0  # preempted, and scheduled again with one block that the engine finds and one that the store has
    scheduler.admit(request, local=1, stored=1)
    plan = scheduler.step(request, tokens=5)
    assert plan.loads == [Transfer("a", [105], hashes([1]))]
    assert plan.saves == []
    scheduler.land(request)
    assert saved(scheduler.step(request)) == hashes([2])


def test_a_request_that_was_preempted_does_not_save_again_what_it_has_saved(scheduler: FakeScheduler) -> None:
    request = FakeRequest("a", 13)
    scheduler.admit(request)
    scheduler.step(request, tokens=8)
    scheduler.land(request)
    assert saved(scheduler.step(request)) == hashes(range(2))
    request.num_computed_tokens = 0
    scheduler.admit(request)
    scheduler.step(request, tokens=13)
    scheduler.land(request)
    assert saved(scheduler.step(request)) == hashes([2])


def test_a_block_is_named_by_the_last_of_the_hashes_in_it() -> None:
    scheduler = FakeScheduler(Plan(BLOCK_TOKENS, hash_block_tokens=2))
    request = FakeRequest("a", 13, hash_tokens=2)
    assert scheduler.admit(request, local=1, stored=1) == hashes([3, 5])
    assert scheduler.step(request, tokens=5).loads == [Transfer("a", [101], hashes([3]))]
    scheduler.land(request)
    assert scheduler.step(request).saves == [Transfer("a", [102], hashes([5]), block_hash(3))]


def test_an_engine_that_only_fills_the_store_asks_for_nothing() -> None:
    scheduler = FakeScheduler(Plan(BLOCK_TOKENS, hash_block_tokens=BLOCK_TOKENS, loads=False))
    request = FakeRequest("a", 9)
    assert scheduler.admit(request, stored=2) == []
    scheduler.step(request, tokens=9)
    scheduler.land(request)
    assert saved(scheduler.step(request)) == hashes(range(2))


def test_an_engine_that_only_uses_the_store_saves_nothing() -> None:
    scheduler = FakeScheduler(Plan(BLOCK_TOKENS, hash_block_tokens=BLOCK_TOKENS, saves=False))
    request = FakeRequest("a", 9)
    assert scheduler.admit(request, stored=1) == hashes(range(2))
    scheduler.step(request, tokens=5)
    scheduler.land(request)
    assert scheduler.step(request).saves == []
    assert not scheduler.finish(request)


def test_requests_that_it_does_not_know_are_left_alone(scheduler: FakeScheduler) -> None:
    stranger = FakeRequest("stranger", 9, num_computed_tokens=9)
    assert scheduler.step(stranger).saves == []
    request = FakeRequest("a", 9)
    scheduler.admit(request)
    scheduler.step(request, tokens=9)
    scheduler.land(request)
    del scheduler.tables["a"]
    assert scheduler.step(request).saves == [], "without its blocks nothing can be saved"
