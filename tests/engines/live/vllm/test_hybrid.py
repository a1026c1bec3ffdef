"""Models whose layers have caches of several kinds, on vLLM's hybrid cache manager: windows beside full attention, windows only, states."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.client.processes import Cluster
from tests.engines.live.conftest import make_model
from tests.engines.live.vllm.conftest import LOSING
from tests.engines.live.vllm.engines import BLOCK_TOKENS, PATIENT, Engine, check_all, expected, random_tokens

BLOCKS = 9
CACHED = BLOCKS * BLOCK_TOKENS
STEP_TOKENS = 4 * BLOCK_TOKENS
"""A prompt is computed in chunks: the engine lets go of what has left a window between them."""
MAMBA_STEP_TOKENS = BLOCK_TOKENS
"""In a longer chunk vLLM 0.32.0 saves the state at a block's end from within it, which its kernel of Mamba 2 for CPUs does not give out."""


@dataclass(frozen=True)
class Hybrid:
    """A model, and engines of it: without a store, one that fills it and one that uses it."""

    plain: Engine
    first: Engine
    second: Engine

    def prompt(self, seed: int, blocks: int = BLOCKS) -> list[int]:
        return random_tokens(seed, blocks * BLOCK_TOKENS + 7)

    def check(self, engine: Engine, asked: list[int], *, cached: int, tokens: int = 8, before: Sequence[list[int]] = ()) -> None:
        """Check that `engine`, with its own cache cleared, answers a prompt as an engine without a store does.

        `before`: earlier prompts of the engine without a store, which are in its own cache. On a CPU the position at which a prompt
        continues matters, even without a store. With other chunks of short convolutions, vLLM's log-probabilities differ by 0.04.
        """
        self.plain.forget()
        for earlier in before:
            self.plain.generate(earlier)
        (right,) = self.plain.generate(asked, tokens=tokens)
        engine.forget()
        engine.save(asked, tokens=tokens)[0].check_same(right, cached=cached)


@pytest.fixture(scope="module", params=["windows", "sliding", "states", "mamba"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, store: Cluster) -> Iterator[Hybrid]:
    model: Path = make_model(tmp_path_factory, request.param)
    settings = PATIENT | {"master": store.address}
    options: dict[str, Any] = {
        "disable_hybrid_kv_cache_manager": False,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": MAMBA_STEP_TOKENS if request.param == "mamba" else STEP_TOKENS,
    }
    with (
        Engine(model, **options) as plain,
        Engine(model, store=settings, connector=LOSING, **options) as first,
        Engine(model, store=settings, connector=LOSING, **options) as second,
    ):
        yield Hybrid(plain, first, second)


def test_a_prompt_that_one_engine_computed_is_another_s(hybrid: Hybrid) -> None:
    asked = hybrid.prompt(1)
    hybrid.check(hybrid.first, asked, cached=0)
    for engine in (hybrid.first, hybrid.second):
        hybrid.check(engine, asked, cached=CACHED)


def test_a_conversation_goes_on_in_another_engine(hybrid: Hybrid) -> None:
    """The next turn begins with a prefix, of which a window's last blocks were computed when the first turn was answered."""
    asked = hybrid.prompt(2)
    hybrid.check(hybrid.first, asked, cached=0, tokens=2 * BLOCK_TOKENS)
    longer = asked + hybrid.prompt(3, blocks=3)
    hybrid.check(hybrid.second, longer, cached=CACHED, before=[asked])
    longest = longer + hybrid.prompt(4, blocks=1)
    hybrid.check(hybrid.first, longest, cached=len(longer) // BLOCK_TOKENS * BLOCK_TOKENS, before=[asked, longer])


@pytest.mark.parametrize(
    ("hybrid", "group"),
    [("windows", 0), ("windows", 1), ("sliding", 0), ("states", 0), ("states", 1), ("mamba", 0), ("mamba", 1)],
    indirect=["hybrid"],
)
def test_evicted_block_of_one_group_is_recomputed_and_saved(hybrid: Hybrid, group: int) -> None:
    """None of the request's other blocks is taken for computed."""
    asked = hybrid.prompt(10 + group)
    hybrid.check(hybrid.first, asked, cached=0)
    (right,) = expected(hybrid.plain, asked)
    hybrid.second.tell("lose", places=[0], group=group)
    hybrid.second.generate(asked)[0].check_same(right)
    hybrid.second.flush()
    hybrid.check(hybrid.first, asked, cached=CACHED)


@pytest.mark.parametrize("hybrid", ["windows", "sliding", "mamba"], indirect=True)
def test_preempted_hybrid_requests_give_the_same_output(hybrid: Hybrid) -> None:
    """Not of short convolutions, of which vLLM itself makes something else when they are computed in other chunks: see `Hybrid.check`."""
    asked = [hybrid.prompt(seed) for seed in range(20, 28)]
    right = expected(hybrid.plain, *asked, tokens=110)
    for engine in (hybrid.first, hybrid.second):
        engine.forget()
        check_all(engine.generate(*asked, tokens=110), right)
        engine.flush()
