"""kvstore-router before real vLLM servers: requests go where their prefix is, in an engine's own memory or at its node."""

from tests.engines.live.http_engine import PATIENCE_S
from tests.engines.live.router.fleet import BLOCK_TOKENS, Fleet
from tests.engines.live.vllm.engines import prompt
from tests.system.running import until

BLOCKS = 12
OWN_BLOCKS = 256
FLEET = {"blocks": OWN_BLOCKS}


def test_router_sends_prompt_to_engine_with_its_prefix(fleet: Fleet) -> None:
    """Only the engines' reports of their own memory decide: the scheduler knows no node."""
    fleet.start_sidecars(node="")
    asked = prompt(1, BLOCKS)
    before = fleet.own_blocks()
    first = fleet.ask(asked)
    assert first.decision["prefix_blocks"] == 0
    assert first.decision["prefill"] == first.decision["decode"]
    holder = first.decision["prefill"]
    until(lambda: fleet.own_blocks()[holder] >= before[holder] + BLOCKS, "its blocks, at the scheduler", PATIENCE_S)
    for _ in range(3):
        again = fleet.ask(asked)
        assert (again.decision["prefill"], again.decision["prefix_blocks"]) == (holder, BLOCKS)
        assert again.text == first.text
    longer = fleet.ask(asked + prompt(2, 1))
    assert (longer.decision["prefill"], longer.decision["prefix_blocks"]) == (holder, BLOCKS)


def test_a_prompt_that_only_the_store_has_is_found_there(fleet: Fleet) -> None:
    """No engine has it in memory of its own, but all engines' node has."""
    fleet.start_sidecars()
    asked = prompt(3, BLOCKS)
    first = fleet.ask(asked)
    for seed in range(100, 160):
        fleet.ask(prompt(seed, 16), 1)
    assert max(fleet.own_blocks().values()) <= OWN_BLOCKS
    before = fleet.loaded_tokens()
    again = fleet.ask(asked)
    assert again.decision["prefix_blocks"] == BLOCKS
    assert again.text == first.text
    assert fleet.loaded_tokens() - before == BLOCKS * BLOCK_TOKENS


def test_an_engine_that_dies_is_passed_over(fleet: Fleet) -> None:
    fleet.start_sidecars()
    fleet.servers[0].close()
    until(lambda: list(fleet.own_blocks()) == ["e1"], "one engine left", PATIENCE_S)
    for seed in range(200, 203):
        assert fleet.ask(prompt(seed, BLOCKS)).decision["prefill"] == "e1"
