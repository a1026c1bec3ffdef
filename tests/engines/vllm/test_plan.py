"""Loads and saves of a scheduler's steps, without an engine.

Blocks are saved once, when they are confirmed, and never if they were computed on a failed load.

`LayerGroup`: blocks that a prefix needs of each kind of cache.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.engines.retention import RequestRetention, parse_retention
from kvstore.engines.vllm.identity import Variant
from kvstore.engines.vllm.plan import BlockTransfer, EngineRequest, LayerGroup, SchedulerPlan, StepPlan, loads_all_or_nothing
from kvstore.protocol.retention import Retention
from tests.engines.vllm.requests import BLOCK_TOKENS, FakeRequest, FakeScheduler, block_hash, hashes


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler(plan())


class Weights:
    """Those of an engine, which a test changes."""

    def __init__(self) -> None:
        self.variant: Variant | None = Variant("")

    def of(self, request: object) -> Variant | None:
        return self.variant


def plan(
    *groups: LayerGroup,
    given_away: set[int] | None = None,
    hash_tokens: int = BLOCK_TOKENS,
    weights: Weights | None = None,
    **how: Any,
) -> SchedulerPlan:
    """`given_away`: blocks that cannot be copied once their request has let them go."""
    lost = given_away or set()
    return SchedulerPlan(
        groups or [LayerGroup(BLOCK_TOKENS)],
        hash_block_tokens=hash_tokens,
        is_whole=lambda block: block not in lost,
        variant=(weights or Weights()).of,
        **how,
    )


def saved(plan: StepPlan) -> list[bytes]:
    return [block for transfer in plan.saves for block in transfer.hashes]


def test_all_but_the_last_token_is_looked_for(scheduler: FakeScheduler) -> None:
    assert scheduler.admit(FakeRequest("a", 12)) == hashes(range(2))
    assert scheduler.admit(FakeRequest("b", 13)) == hashes(range(3))
    assert scheduler.admit(FakeRequest("c", 3)) == []


def test_what_the_engine_has_is_not_looked_for(scheduler: FakeScheduler) -> None:
    assert scheduler.admit(FakeRequest("a", 13), local=2) == hashes([2])
    assert scheduler.admit(FakeRequest("b", 13), local=3) == []


def test_found_blocks_load_after_the_engines_own(scheduler: FakeScheduler) -> None:
    scheduler.admit(FakeRequest("a", 17), local=1, stored=2)
    plan = scheduler.step()
    assert plan.loads == [BlockTransfer("a", [101, 102], hashes([1, 2]))]
    assert plan.is_idle
    assert scheduler.step().loads == []


def test_engine_that_declines_found_blocks_loads_nothing(scheduler: FakeScheduler) -> None:
    request = FakeRequest("a", 17)
    scheduler.plan.missing_hashes(request, 4)
    scheduler.plan.found(request, 4)
    scheduler.plan.allocated(request, [[1, 2, 3, 4, 5]], 0)
    request.num_computed_tokens = 4
    scheduler.tables["a"] = [[1, 2, 3, 4, 5]]
    assert not scheduler.step(request, tokens=12).loads
    scheduler.land(request)
    assert saved(scheduler.step(request)) == hashes([1, 2, 3])


def test_blocks_are_saved_once_their_step_is_confirmed(scheduler: FakeScheduler) -> None:
    request = scheduler.admitted(FakeRequest("a", 12))
    assert scheduler.step(request, tokens=8).saves == []
    assert scheduler.step(request, tokens=4).saves == [], "the first step is still on its way"
    scheduler.land(request)
    assert scheduler.step(request).saves == [BlockTransfer("a", [100, 101, 102], hashes(range(3)))]
    assert scheduler.step(request).saves == []


def test_the_block_before_is_named(scheduler: FakeScheduler) -> None:
    request = scheduler.admitted(FakeRequest("a", 12), local=1, stored=1)
    scheduler.run(request, tokens=4)
    assert scheduler.step(request).saves == [BlockTransfer("a", [102], hashes([2]), block_hash(1))]


def test_blocks_whose_tokens_are_not_certain_are_not_saved(scheduler: FakeScheduler) -> None:
    request = scheduler.admitted(FakeRequest("a", 7, num_computed_tokens=0))
    scheduler.tables["a"][0].append(999)
    scheduler.run(request, tokens=9)  # of which some are guesses
    assert saved(scheduler.step(request)) == hashes([0])
    request.num_tokens = 8
    assert saved(scheduler.step(request)) == hashes([1])


def test_what_came_from_the_store_is_not_saved(scheduler: FakeScheduler) -> None:
    request = scheduler.admitted(FakeRequest("a", 13), stored=3)
    scheduler.run(request, tokens=1)
    assert scheduler.step(request).saves == []


def test_failed_blocks_are_saved_once_computed(scheduler: FakeScheduler) -> None:
    request, other = FakeRequest("a", 17), FakeRequest("b", 17, text="b")
    scheduler.admit(request, stored=4)
    scheduler.admit(other, stored=4)
    scheduler.step(request, other, tokens=1)
    scheduler.plan.failed_blocks([101])
    scheduler.plan.failed_blocks([])
    scheduler.land(request, other)
    request.num_computed_tokens = BLOCK_TOKENS  # vLLM takes back what stood on block 101
    assert scheduler.step(request, other, tokens=13).saves == []
    scheduler.land(request, other)
    assert saved(scheduler.step(request, other)) == hashes([1, 2, 3])


def test_store_is_not_asked_again_after_a_failed_load(scheduler: FakeScheduler) -> None:
    request = scheduler.admitted(FakeRequest("a", 9), stored=2)
    scheduler.step()
    scheduler.plan.failed_blocks([100])
    assert scheduler.admit(request, stored=2) == [], "else it would be asked for the same blocks for ever"
    assert scheduler.step().loads == []


def test_failure_of_a_reallocated_block_is_ignored(scheduler: FakeScheduler) -> None:
    request = scheduler.admitted(FakeRequest("a", 13), stored=2)
    scheduler.step()
    scheduler.plan.allocated(request, scheduler.tables["a"], 0)  # the load is over
    scheduler.plan.failed_blocks([100])
    assert scheduler.plan.missing_hashes(request, 0) == [hashes(range(3))]


def test_earliest_failed_block_over_all_ranks_counts(scheduler: FakeScheduler) -> None:
    request = scheduler.admitted(FakeRequest("a", 18), stored=4)
    scheduler.step()
    scheduler.plan.failed_blocks([103])
    scheduler.step()
    scheduler.plan.failed_blocks([101])
    request.num_computed_tokens = BLOCK_TOKENS
    scheduler.plan.allocated(request, scheduler.tables["a"], 0)
    scheduler.run(request, tokens=14)
    assert saved(scheduler.step(request)) == hashes([1, 2, 3])


def test_engine_drops_hashes_behind_a_failed_load(scheduler: FakeScheduler) -> None:
    """vLLM hashes a step's blocks when it gives them out, and sees what is aborted meanwhile before what did not come."""
    request, other = FakeRequest("a", 18), FakeRequest("b", 9, text="b")
    scheduler.admit(request, stored=3)
    scheduler.admit(other)
    scheduler.step(request, other, tokens=6)
    scheduler.finish(request)
    assert scheduler.plan.failed_blocks([101, 102]) == {101, 102, 103, 104}
    scheduler.land(other)
    scheduler.step(other)
    assert scheduler.plan.failed_blocks([101]) == set(), "a failure of a step is known before the next one is planned"


def test_blocks_computed_on_a_failed_load_are_never_saved(scheduler: FakeScheduler) -> None:
    request, sharing = FakeRequest("a", 14), FakeRequest("b", 30)
    scheduler.admit(request, stored=3)
    scheduler.admit_sharing(sharing, request, blocks=3)
    scheduler.step(request, sharing, tokens=2)
    assert scheduler.plan.failed_blocks([101]) >= {101, 102, *scheduler.tables["b"][0][3:]}
    request.num_computed_tokens = BLOCK_TOKENS  # and vLLM has `sharing` go on, for `request` computes what they share
    scheduler.land(request, sharing)
    assert scheduler.step(request, sharing, tokens=10).saves == []
    assert not scheduler.finish(request), "nor what it had not saved is taken over"
    scheduler.land(sharing)
    assert scheduler.step(sharing, tokens=4).saves == []
    forgotten = scheduler.plan.tainted_blocks(scheduler.tables.get, ["a", "b", "of no plan"])
    assert forgotten == set(scheduler.tables["b"][0]), "and the engine shares it with nobody"
    assert not scheduler.finish(sharing)


def test_unconfirmed_blocks_are_saved_by_a_sharing_request(scheduler: FakeScheduler) -> None:
    request, sharing, other = FakeRequest("a", 14), FakeRequest("b", 22), FakeRequest("c", 14)
    scheduler.admit(request)
    scheduler.admit(other, local=3)
    scheduler.admit_sharing(sharing, request, blocks=3)
    scheduler.step(request, other, tokens=14)
    scheduler.step(sharing, tokens=10)
    assert not scheduler.finish(request), "aborted before the outcome of its only step is known"
    scheduler.land(sharing, other)
    assert scheduler.step(sharing, tokens=1).saves == [BlockTransfer("b", scheduler.tables["b"][0][:5], hashes(range(5)))]


def test_window_blocks_are_not_adopted_by_a_sharing_request() -> None:
    """Else what another request has in them by then would be saved under the sharer's hashes."""
    scheduler = FakeScheduler(plan(LayerGroup(BLOCK_TOKENS, window_tokens=8)))
    request, sharing = FakeRequest("a", 14), FakeRequest("b", 22)
    scheduler.admit(request)
    scheduler.admit_sharing(sharing, request, blocks=3)
    scheduler.step(request, tokens=14)
    scheduler.step(sharing, tokens=10)
    scheduler.finish(request)
    scheduler.land(sharing)
    assert saved(scheduler.step(sharing, tokens=1)) == hashes([3, 4])


def test_unconfirmed_blocks_survive_a_preemption(scheduler: FakeScheduler) -> None:
    request = scheduler.admitted(FakeRequest("a", 14))
    scheduler.step(request, tokens=14)
    scheduler.plan.found(request, 8)
    scheduler.plan.allocated(request, [[100, 101, 102, 103]], 0)  # preempted, and what it had computed is found
    request.num_computed_tokens = 8 + 14  # of which 14 are of the step before, which has yet to land
    assert scheduler.step(request).saves == [BlockTransfer("a", [100, 101], hashes(range(2)))]


def test_last_confirmed_blocks_are_saved_by_the_next_step(scheduler: FakeScheduler) -> None:
    request = scheduler.admitted(FakeRequest("a", 9))
    scheduler.run(request, tokens=9)
    assert scheduler.finish(request)
    assert scheduler.plan.is_holding
    plan = scheduler.step()
    assert plan.saves == [BlockTransfer("a", [100, 101], hashes(range(2)))]
    assert plan.finishing == ["a"]
    scheduler.plan.released(["a"])
    assert not scheduler.plan.is_holding
    assert scheduler.step().saves == []


def test_a_request_that_is_over_with_nothing_to_save_is_let_go(scheduler: FakeScheduler) -> None:
    request = scheduler.admitted(FakeRequest("a", 9), stored=2)
    assert not scheduler.finish(request), "it was aborted while its blocks came"
    assert not scheduler.finish(request), "nothing is known of it"


def test_hits_of_a_resumed_request_are_not_saved_too_early(scheduler: FakeScheduler) -> None:
    request = scheduler.admitted(FakeRequest("a", 13))
    scheduler.run(request, tokens=8)
    request.num_computed_tokens = 0  # preempted, and scheduled again with one block that the engine finds and one that the store has
    scheduler.admit(request, local=1, stored=1)
    plan = scheduler.step(request, tokens=5)
    assert plan.loads == [BlockTransfer("a", [105], hashes([1]))]
    assert plan.saves == []
    scheduler.land(request)
    assert saved(scheduler.step(request)) == hashes([2])


def test_preempted_request_saves_nothing_twice(scheduler: FakeScheduler) -> None:
    request = scheduler.admitted(FakeRequest("a", 13))
    scheduler.run(request, tokens=8)
    assert saved(scheduler.step(request)) == hashes(range(2))
    request.num_computed_tokens = 0
    scheduler.admit(request)
    scheduler.run(request, tokens=13)
    assert saved(scheduler.step(request)) == hashes([2])


def test_a_block_is_named_by_the_last_of_the_hashes_in_it() -> None:
    scheduler = FakeScheduler(plan(hash_tokens=2))
    request = FakeRequest("a", 13, hash_tokens=2)
    assert scheduler.admit(request, local=1, stored=1) == hashes([3, 5])
    assert scheduler.step(request, tokens=5).loads == [BlockTransfer("a", [101], hashes([3]))]
    scheduler.land(request)
    assert scheduler.step(request).saves == [BlockTransfer("a", [102], hashes([5]), block_hash(3))]


def test_an_engine_that_only_fills_the_store_asks_for_nothing() -> None:
    scheduler = FakeScheduler(plan(loads=False))
    request = FakeRequest("a", 9)
    assert scheduler.admit(request, stored=2) == []
    scheduler.run(request, tokens=9)
    assert saved(scheduler.step(request)) == hashes(range(2))


def test_an_engine_that_only_uses_the_store_saves_nothing() -> None:
    scheduler = FakeScheduler(plan(saves=False))
    request = FakeRequest("a", 9)
    assert scheduler.admit(request, stored=1) == hashes(range(2))
    scheduler.run(request, tokens=5)
    assert scheduler.step(request).saves == []
    assert not scheduler.finish(request)


def test_requests_that_it_does_not_know_are_left_alone(scheduler: FakeScheduler) -> None:
    stranger = FakeRequest("stranger", 9, num_computed_tokens=9)
    assert scheduler.step(stranger).saves == []
    request = scheduler.admitted(FakeRequest("a", 9))
    table = scheduler.tables.pop("a")
    scheduler.run(request, tokens=9)
    scheduler.tables["a"] = table
    assert scheduler.step(request).saves == [], "nobody knows where its blocks lie"


# --- groups of layers ---
HYBRID = (LayerGroup(BLOCK_TOKENS), LayerGroup(BLOCK_TOKENS, window_tokens=BLOCK_TOKENS + 1), LayerGroup(BLOCK_TOKENS, 1, is_state=True))
"""To go on after four blocks the second needs the last two, the third the last state."""


def of_group(plan: StepPlan, group: int) -> list[bytes]:
    return [block for transfer in plan.saves if transfer.group == group for block in transfer.hashes]


@pytest.fixture
def hybrid() -> FakeScheduler:
    return FakeScheduler(plan(*HYBRID), groups=3)


def test_of_each_group_only_what_it_needs_is_loaded(hybrid: FakeScheduler) -> None:
    hybrid.admit(FakeRequest("a", 17), stored=4)
    assert hybrid.step().loads == [
        BlockTransfer("a", [100, 101, 102, 103], hashes(range(4))),
        BlockTransfer("a", [107, 108], hashes([2, 3]), group=1),
        BlockTransfer("a", [113], hashes([3]), group=2),
    ]


def test_partly_cached_window_is_not_loaded_twice(hybrid: FakeScheduler) -> None:
    hybrid.admit(FakeRequest("a", 17), local=3, stored=1)
    assert [transfer.blocks for transfer in hybrid.step().loads] == [[103], [108], [113]]


def test_a_group_that_needs_nothing_loads_nothing() -> None:
    scheduler = FakeScheduler(plan(LayerGroup(BLOCK_TOKENS), LayerGroup(4 * BLOCK_TOKENS, 1)), groups=2)
    request = FakeRequest("a", 17)
    scheduler.plan.found(request, 8)
    scheduler.plan.allocated(request, [[1, 2, 3, 4], [5]], 0)
    assert scheduler.step().loads == []


def test_blocks_leaving_a_window_are_saved_in_that_step(hybrid: FakeScheduler) -> None:
    request = hybrid.admitted(FakeRequest("a", 17))
    hybrid.run(request, tokens=16)
    hybrid.tables["a"][1][:3] = [0, 0, 0]
    plan = hybrid.step(request, tokens=1)
    assert of_group(plan, 0) == of_group(plan, 1) == hashes(range(4))
    assert [transfer.blocks for transfer in plan.saves] == [[100, 101, 102, 103], [105, 106, 107, 108]]
    assert of_group(plan, 2) == [], "nobody said that there is a state"
    assert hybrid.step(request).saves == []


def test_states_are_saved_where_the_engine_has_them(hybrid: FakeScheduler) -> None:
    request = hybrid.admitted(FakeRequest("a", 17))
    hybrid.states = {"a": [(2, 60, 12), (2, 61, 14), (2, 62, 0)]}
    hybrid.step(request, tokens=12)
    hybrid.states = {"a": [(2, 63, 16)]}
    assert of_group(hybrid.step(request, tokens=4), 2) == [], "its step is still on its way"
    hybrid.land(request)
    plan = hybrid.step(request)
    assert [transfer for transfer in plan.saves if transfer.group == 2] == [BlockTransfer("a", [60, 63], hashes([2, 3]), block_hash(1), 2)]


def test_what_is_written_to_before_it_can_be_copied_is_not_saved() -> None:
    scheduler = FakeScheduler(plan(*HYBRID[:2], given_away={105, 107, 110, 111}), groups=2)
    request, other = FakeRequest("a", 17), FakeRequest("b", 9, text="b")
    scheduler.admit(request)
    scheduler.run(request, tokens=12)
    scheduler.tables["a"][1][:2] = [0, 0]
    assert of_group(scheduler.step(request, tokens=4), 1) == hashes([1, 2]), "107 is still its own"
    scheduler.land(request)
    scheduler.tables["a"][1][:] = [0] * 5
    assert of_group(scheduler.step(request), 1) == hashes([3])
    scheduler.admit(other)
    assert scheduler.tables["b"] == [[110, 111, 112], [113, 114, 115]]
    scheduler.tables["b"][1][:2] = [110, 111]
    scheduler.run(other, tokens=8)
    scheduler.tables["b"][1][:] = [0, 0, 0]
    assert of_group(scheduler.step(other), 1) == []


def test_prepared_blocks_of_a_preempted_request_are_not_saved() -> None:
    """The engine zeroes a prepared block even if no request holds it any more."""
    scheduler = FakeScheduler(plan(*HYBRID[:2]), groups=2)
    running, over = FakeRequest("a", 13, text="a"), FakeRequest("b", 9, text="b")
    for request in (running, over):
        scheduler.admit(request)
    assert (scheduler.tables["a"][1], scheduler.tables["b"][1]) == ([104, 105, 106, 107], [111, 112, 113])
    scheduler.run(running, over, tokens=9)
    scheduler.tables["b"][1][:] = [0, 0, 0]
    assert scheduler.finish(over)
    scheduler.tables["a"][1][:1] = [0]
    step = scheduler.step(running, tokens=4, prepared={104, 105, 112})
    assert of_group(step, 0) == [*hashes(range(2), "b"), *hashes(range(2), "a")]
    assert of_group(step, 1) == [*hashes([0], "b"), *hashes([1], "a")], "105 is still its own"
    scheduler.land(running)
    scheduler.tables["a"][1][:] = [0] * 4
    assert of_group(scheduler.step(running), 1) == hashes([2], "a"), "another step prepares other blocks"


def test_freed_blocks_of_a_finished_request_are_saved_if_intact() -> None:
    scheduler = FakeScheduler(plan(*HYBRID[:2], given_away={104, 109, 110}), groups=2)
    requests = [FakeRequest(name, 9, text=name) for name in "ab"]
    for request in requests:
        scheduler.admit(request)
    scheduler.run(*requests, tokens=9)
    for request in requests:
        scheduler.tables[request.request_id][1][:] = [0, 0, 0]
        assert scheduler.finish(request)
    last = scheduler.step()
    assert of_group(last, 0) == [*hashes(range(2), "a"), *hashes(range(2), "b")]
    assert of_group(last, 1) == hashes([0], "a")
    assert last.finishing == ["a", "b"]


def test_a_request_that_failed_is_begun_anew(hybrid: FakeScheduler) -> None:
    request = hybrid.admitted(FakeRequest("a", 17), local=1, stored=3)
    hybrid.step()
    hybrid.plan.failed_requests(["a", "stranger"])
    assert hybrid.plan.missing_hashes(request, 0) == [[], [], []]
    assert hybrid.admit(request, local=1) == []
    assert hybrid.step(request, tokens=13).loads == []
    hybrid.land(request)
    assert of_group(hybrid.step(request), 1) == hashes([1, 2, 3])


def test_groups_of_other_block_sizes_look_up_whole_blocks() -> None:
    scheduler = FakeScheduler(plan(LayerGroup(2 * BLOCK_TOKENS), LayerGroup(BLOCK_TOKENS, 4)), groups=2)
    missing_hashes = scheduler.plan.missing_hashes(FakeRequest("a", 16), 0)
    assert missing_hashes == [hashes([1]), hashes([0, 1])]


@pytest.fixture
def weights() -> Weights:
    return Weights()


@pytest.fixture
def updated(weights: Weights) -> FakeScheduler:
    """An engine whose weights a test changes."""
    return FakeScheduler(plan(weights=weights))


def change(scheduler: FakeScheduler, weights: Weights, variant: Variant | None) -> None:
    weights.variant = variant
    scheduler.plan.change_variants()


def test_a_request_that_began_with_other_weights_saves_nothing(updated: FakeScheduler, weights: Weights) -> None:
    """Neither what it computed before and has not saved, nor what it computes later; and it loads nothing once it was preempted."""
    request, later = FakeRequest("a", 17), FakeRequest("b", 17)
    updated.admit(request)
    updated.step(request, tokens=8)
    change(updated, weights, Variant("new"))
    updated.land(request)
    assert saved(updated.step(request, tokens=8)) == []
    assert updated.plan.tainted_blocks(updated.tables.get, ["a", "b"]) == set(updated.tables["a"][0])
    updated.land(request)
    assert updated.plan.variant(request) is None
    assert updated.admit(request) == []
    assert updated.admit(later) == hashes(range(4))
    assert not updated.finish(request)
    updated.run(later, tokens=8)
    (transfer,) = updated.step(later).saves
    assert (transfer.variant, transfer.hashes) == (Variant("new"), hashes(range(2)))


def test_waiting_request_is_computed_by_current_weights(updated: FakeScheduler, weights: Weights) -> None:
    request = FakeRequest("a", 17)
    assert updated.plan.missing_hashes(request, 0) == [hashes(range(4))]
    change(updated, weights, Variant("new"))
    assert updated.plan.variant(request) == Variant("new")
    updated.admit(request, stored=2)
    (load,) = updated.step().loads
    assert load.variant == Variant("new")


def test_request_preempted_before_a_change_taints_no_blocks(updated: FakeScheduler, weights: Weights) -> None:
    """The new weights recompute the whole request: vLLM may share its blocks, and none of them is saved."""
    request = updated.admitted(FakeRequest("a", 17))
    updated.run(request, tokens=8)
    request.num_computed_tokens = 0
    change(updated, weights, Variant("new"))
    updated.admit(request)
    assert saved(updated.step(request, tokens=16)) == []
    updated.land(request)
    assert saved(updated.step(request)) == []
    assert updated.plan.tainted_blocks(updated.tables.get, ["a"]) == set()


def test_blocks_that_wait_to_be_copied_keep_their_variant(updated: FakeScheduler, weights: Weights) -> None:
    request = updated.admitted(FakeRequest("a", 9))
    updated.run(request, tokens=9)
    assert updated.finish(request)
    change(updated, weights, Variant("new"))
    (transfer,) = updated.step().saves
    assert (transfer.variant, transfer.hashes) == (Variant(""), hashes(range(2)))


def test_blocks_go_over_to_no_request_of_other_weights(updated: FakeScheduler, weights: Weights) -> None:
    """vLLM does not know of the change, so both requests share the blocks."""
    owner, sharing = FakeRequest("a", 13), FakeRequest("b", 13)
    updated.admit(owner)
    updated.step(owner, tokens=12)
    weights.variant = Variant("new")
    updated.admit_sharing(sharing, owner, blocks=2)
    updated.step(sharing, tokens=4)
    updated.plan.change_variants()
    assert not updated.finish(owner)
    updated.land(sharing)
    assert saved(updated.step(sharing)) == hashes([2])


def test_nothing_is_loaded_or_saved_with_unknown_weights(updated: FakeScheduler, weights: Weights) -> None:
    weights.variant = None
    waiting, begun = FakeRequest("a", 13), FakeRequest("b", 13)
    assert updated.plan.missing_hashes(waiting, 0) == [[]]
    assert updated.admit(begun) == []
    updated.step(begun, tokens=8)
    change(updated, weights, Variant("known"))
    updated.land(begun)
    assert saved(updated.step(begun, tokens=4)) == []
    assert updated.plan.missing_hashes(waiting, 0) == [hashes(range(3))]
    assert not updated.finish(begun)


def test_a_request_whose_load_the_engine_took_back_begins_again(updated: FakeScheduler, weights: Weights) -> None:
    request = updated.admitted(FakeRequest("a", 17), stored=2)
    updated.step()
    updated.plan.requeued(["a", "unknown"])
    change(updated, weights, Variant("new"))
    assert updated.admit(request, stored=3) == hashes(range(4))
    (load,) = updated.step().loads
    assert (load.variant, load.hashes) == (Variant("new"), hashes(range(3)))


def test_a_request_that_had_been_computed_does_not_begin_again(updated: FakeScheduler, weights: Weights) -> None:
    request = updated.admitted(FakeRequest("a", 17))
    updated.run(request, tokens=8)
    updated.admit(request, stored=2)
    updated.plan.requeued(["a"])
    change(updated, weights, Variant("new"))
    assert updated.admit(request) == []


def test_adapters_are_those_of_the_requests(updated: FakeScheduler) -> None:
    loras = [SimpleNamespace(lora_int_id=number) for number in (1, 2, 1)]
    for number, lora in enumerate([*loras, None]):
        request = FakeRequest(str(number), 9)
        request.lora_request = lora  # type: ignore[attr-defined]
        updated.admit(request)
    assert [lora.lora_int_id for lora in updated.plan.adapters()] == [1, 2]


FULL, WINDOW, STATE = LayerGroup(4), LayerGroup(4, window_tokens=5), LayerGroup(4, 1, is_state=True)


@pytest.mark.parametrize(("group", "first"), [(FULL, [0, 0, 0, 0]), (WINDOW, [0, 0, 0, 1]), (STATE, [0, 0, 1, 2])])
def test_the_blocks_before_a_window_are_not_needed(group: LayerGroup, first: list[int]) -> None:
    assert [group.first_needed(tokens) for tokens in (0, 4, 8, 12)] == first


@pytest.mark.parametrize(
    ("group", "ends"), [(FULL, [True, False, False, False]), (WINDOW, [True, False, False, True]), (STATE, [True, False, True, True])]
)
def test_can_resume_where_all_needed_blocks_are_present(group: LayerGroup, ends: list[bool]) -> None:
    assert group.can_go_on(np.array([True, False, True, True])).tolist() == ends


def test_only_full_attention_of_one_group_loads_partially() -> None:
    assert not loads_all_or_nothing([FULL])
    assert loads_all_or_nothing([FULL, FULL])
    assert loads_all_or_nothing([WINDOW])


def hinted(request: EngineRequest) -> RequestRetention | None:
    """The hints of a request, without settings."""
    return parse_retention((request.kv_transfer_params or {}).get("retention", {}), 100)[0]


def hinted_scheduler(*groups: LayerGroup) -> FakeScheduler:
    chosen = groups or (LayerGroup(BLOCK_TOKENS),)
    made = SchedulerPlan(
        chosen, hash_block_tokens=BLOCK_TOKENS, is_whole=lambda block: True, variant=lambda request: Variant(""), retention=hinted
    )
    return FakeScheduler(made, groups=len(chosen))


def test_saves_are_split_by_hints_of_token_ranges() -> None:
    scheduler = hinted_scheduler()
    params = {"retention": {"session": "s", "ranges": [[0, 6, 90], [12, None, 10]]}}
    request = scheduler.admitted(FakeRequest("a", 20, kv_transfer_params=params))
    scheduler.run(request, tokens=20)
    assert scheduler.step(request).saves == [
        BlockTransfer("a", [100, 101], hashes([0, 1]), retention=Retention(90, session="s")),
        BlockTransfer("a", [102], hashes([2]), block_hash(1), retention=Retention(session="s")),
        BlockTransfer("a", [103, 104], hashes([3, 4]), block_hash(2), retention=Retention(10, session="s")),
    ]


def test_loads_are_split_by_hints_of_token_ranges() -> None:
    scheduler = hinted_scheduler()
    params = {"retention": {"ranges": [[0, 12, 90]]}}
    scheduler.admit(FakeRequest("a", 21, kv_transfer_params=params), local=1, stored=4)
    first, second = scheduler.step().loads
    assert (first.blocks, first.retention) == ([101, 102], Retention(90))
    assert (second.blocks, second.retention) == ([103, 104], None)
    assert scheduler.plan.failed_blocks([103]) == {103, 104, 105}, "it is known as a block that is loaded"


def test_saves_of_a_finished_request_have_its_hints() -> None:
    scheduler = hinted_scheduler()
    request = scheduler.admitted(FakeRequest("a", 8, kv_transfer_params={"retention": {"priority": 70, "ttl_s": 60}}))
    scheduler.run(request, tokens=8)
    assert scheduler.finish(request)
    assert [save.retention for save in scheduler.step().saves] == [Retention(70, 60.0)]


def test_each_group_has_the_hints_of_its_own_blocks() -> None:
    scheduler = hinted_scheduler(LayerGroup(BLOCK_TOKENS), LayerGroup(2 * BLOCK_TOKENS))
    request = scheduler.admitted(FakeRequest("a", 16, kv_transfer_params={"retention": {"ranges": [[0, 4, 90]]}}))
    scheduler.run(request, tokens=16)
    saves = [(save.group, len(save.blocks), save.retention) for save in scheduler.step(request).saves]
    assert saves == [(0, 1, Retention(90)), (0, 3, None), (1, 1, Retention(90)), (1, 1, None)]
