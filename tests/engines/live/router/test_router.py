"""kvstore-router before real vLLM servers: requests go where their prefix is, in an engine's own memory or at its node."""

import random
from collections.abc import Iterator

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import SchedulerClient
from tests.engines.live.router.fleet import BLOCK_TOKENS, PATIENCE_S, Fleet
from tests.engines.live.tiny_model import make
from tests.system.running import until

BLOCKS = 12
OWN_BLOCKS = 256


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = tmp_path_factory.mktemp("model")
    make(model, "tiny")
    with Fleet(tmp_path_factory.mktemp("fleet"), model, blocks=OWN_BLOCKS) as running:
        yield running


def prompt(seed: int, blocks: int = BLOCKS) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 1000) for _ in range(blocks * BLOCK_TOKENS + 7)]


def own_blocks(fleet: Fleet) -> dict[str, int]:
    with SchedulerClient(ClientSettings(master=fleet.store.address, deadline_s=PATIENCE_S)) as client:
        return {each.report.name: each.engine_blocks for each in client.instances().instances}


def test_a_prompt_goes_to_the_engine_that_has_its_prefix_and_gets_the_same_answer(fleet: Fleet) -> None:
    """By what the engines say of their own memory alone: the scheduler is told of no node."""
    fleet.start_sidecars(node="")
    asked = prompt(1)
    before = own_blocks(fleet)
    first = fleet.ask(asked)
    assert first.decision["prefix_blocks"] == 0
    assert first.decision["prefill"] == first.decision["decode"]
    holder = first.decision["prefill"]
    until(lambda: own_blocks(fleet)[holder] >= before[holder] + BLOCKS, "its blocks, at the scheduler", PATIENCE_S)
    for _ in range(3):
        again = fleet.ask(asked)
        assert (again.decision["prefill"], again.decision["prefix_blocks"]) == (holder, BLOCKS)
        assert again.text == first.text
    longer = fleet.ask(asked + prompt(2, 1))
    assert (longer.decision["prefill"], longer.decision["prefix_blocks"]) == (holder, BLOCKS)


def test_a_prompt_that_only_the_store_has_is_found_there(fleet: Fleet) -> None:
    """No engine has it in memory of its own, but all engines' node has."""
    fleet.start_sidecars()
    asked = prompt(3)
    first = fleet.ask(asked)
    for seed in range(100, 160):
        fleet.ask(prompt(seed, 16), 1)
    assert max(own_blocks(fleet).values()) <= OWN_BLOCKS
    before = fleet.loaded_tokens()
    again = fleet.ask(asked)
    assert again.decision["prefix_blocks"] == BLOCKS
    assert again.text == first.text
    assert fleet.loaded_tokens() - before == BLOCKS * BLOCK_TOKENS


def test_an_engine_that_dies_is_passed_over(fleet: Fleet) -> None:
    fleet.start_sidecars()
    fleet.servers[0].close()
    until(lambda: list(own_blocks(fleet)) == ["e1"], "one engine left", PATIENCE_S)
    for seed in range(200, 203):
        assert fleet.ask(prompt(seed)).decision["prefill"] == "e1"
