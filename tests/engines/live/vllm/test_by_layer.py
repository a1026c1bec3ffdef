"""An engine whose layers wait for their own part of what a step loads: what comes of a prompt is what comes without a store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.processes import Cluster
from tests.engines.live.vllm.conftest import LOSING
from tests.engines.live.vllm.engines import BLOCK_TOKENS, PATIENT, Engine, prompt

BLOCKS = 5
CACHED = BLOCKS * BLOCK_TOKENS
PARTS = 3
"""In which the four layers of the model come: one, one more, and two."""


@pytest.fixture(scope="module")
def layered(model: Path, store: Cluster) -> Iterator[Engine]:
    """It has loaded blocks before: from then on its client knows which of them lie on this host."""
    settings = PATIENT | {"master": store.address, "load_async": False, "load_by_layer": True}
    with Engine(model, store=settings, connector=LOSING) as engine:
        engine.generate(prompt(400))
        engine.flush()
        engine.forget()
        engine.generate(prompt(400))
        yield engine


def test_prompts_that_another_engine_computed_are_loaded_layer_by_layer(plain: Engine, waiting: Engine, layered: Engine) -> None:
    """Several at once: a step waits for the loads of all its requests."""
    asked = [prompt(seed, BLOCKS) for seed in range(401, 404)]
    plain.forget()
    right = plain.generate(*asked)
    waiting.generate(*asked)
    waiting.flush()
    before = layered.tell("ranges")
    for answer, wanted in zip(layered.generate(*asked), right, strict=True):
        answer.check_same(wanted)
        assert answer.cached == CACHED
    assert layered.tell("ranges") - before == PARTS * len(asked)


@pytest.mark.parametrize("place", [0, 2])
def test_a_block_that_vanishes_before_it_is_loaded_is_computed_and_saved_again(
    plain: Engine, waiting: Engine, layered: Engine, place: int
) -> None:
    asked = prompt(410 + place, BLOCKS)
    plain.forget()
    (right,) = plain.generate(asked)
    waiting.generate(asked)
    waiting.flush()
    waiting.forget()
    layered.tell("lose", places=[place])
    (answer,) = layered.generate(asked)
    answer.check_same(right)
    layered.flush()
    (again,) = waiting.generate(asked)
    again.check_same(right)
    assert again.cached == CACHED
