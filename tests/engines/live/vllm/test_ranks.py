"""Engines of several ranks, each a process: a prompt is found where those of all ranks have it; and engines of one and of two
tensor-parallel ranks that read each other's blocks, with `share_tp`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.processes import Cluster
from tests.engines.live.conftest import make_model
from tests.engines.live.vllm.engines import BLOCK_TOKENS, PATIENT, Answer, Engine, check_all, expected, prompt

BLOCKS = 5
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
"""Without the compilation, whose warm-up makes them, a second rank of vLLM 0.32.0 on a CPU has no `intermediate_tensors` to receive into;
traced once, by no compiler that takes its time."""


@pytest.mark.parametrize("ranks", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_prompts_that_two_ranks_computed_are_found_by_two_others(model: Path, store: Cluster, plain: Engine, ranks: dict[str, Any]) -> None:
    """Several at once: of a pipeline's steps one begins before the outcome of the last one is known."""
    asked = [prompt(seed, BLOCKS) for seed in range(300, 303)]
    right = expected(plain, *asked)
    options = ranks | {"store": PATIENT | {"master": store.address}}
    for cached in (0, BLOCKS * BLOCK_TOKENS):
        with Engine(model, **options) as engine:
            check_all(engine.generate(*asked), right, cached=cached)
            engine.flush()
            if cached:
                check_named(engine, asked, right)


def check_named(engine: Engine, asked: list[list[int]], right: list[Answer]) -> None:
    """All ranks store and load by another version of the weights once it is named, none before."""
    engine.tell("name", version="v1")
    for cached in (0, BLOCKS * BLOCK_TOKENS):
        engine.forget()
        check_all(engine.generate(*asked), right, cached=cached)
        engine.flush()


@pytest.fixture(scope="module")
def heads_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 KV heads."""
    return make_model(tmp_path_factory, "heads")


def prompts(first: int) -> list[list[int]]:
    return [prompt(seed, BLOCKS) for seed in range(first, first + 3)]


@pytest.fixture(scope="module")
def right(heads_model: Path) -> Iterator[dict[int, list[Answer]]]:
    """Answers of an engine without a store to the prompts from 500 and from 510 on."""
    with Engine(heads_model) as engine:
        yield {first: engine.generate(*prompts(first)) for first in (500, 510)}


@pytest.mark.parametrize("share_tp", [2, 8])
def test_engines_of_one_and_two_ranks_share_both_ways(
    heads_model: Path, store: Cluster, right: dict[int, list[Answer]], share_tp: int
) -> None:
    settings = PATIENT | {"master": store.address, "share_tp": share_tp, "salt": f"share {share_tp}"}
    with Engine(heads_model, store=settings) as one, Engine(heads_model, store=settings, **TENSOR) as two:
        for writer, reader, first in ((one, two, 500), (two, one, 510)):
            for engine, cached in ((writer, 0), (reader, BLOCKS * BLOCK_TOKENS)):
                check_all(engine.generate(*prompts(first)), right[first], cached=cached)
                engine.flush()


def test_two_ranks_with_one_head_share_with_an_engine_of_one(tmp_path_factory: pytest.TempPathFactory, store: Cluster) -> None:
    model = make_model(tmp_path_factory, "one_head")
    settings = PATIENT | {"master": store.address, "share_tp": 1, "salt": "one head"}
    with Engine(model) as engine:
        right = engine.generate(*prompts(520))
    with Engine(model, store=settings, **TENSOR) as two:
        check_all(two.generate(*prompts(520)), right)
        two.flush()
        two.forget()
        check_all(two.generate(*prompts(520)), right, cached=BLOCKS * BLOCK_TOKENS)
    with Engine(model, store=settings) as one:
        check_all(one.generate(*prompts(520)), right, cached=BLOCKS * BLOCK_TOKENS)


HYBRID: dict[str, Any] = {
    "disable_hybrid_kv_cache_manager": False,
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 4 * BLOCK_TOKENS,
}


def test_groups_of_layers_with_windows_are_shared(tmp_path_factory: pytest.TempPathFactory, store: Cluster) -> None:
    model = make_model(tmp_path_factory, "windows")
    settings = PATIENT | {"master": store.address, "share_tp": 2, "salt": "windows"}
    with Engine(model, **HYBRID) as engine:
        right = engine.generate(*prompts(530))
    for options, cached in ((TENSOR, 0), ({}, BLOCKS * BLOCK_TOKENS)):
        with Engine(model, store=settings, **HYBRID, **options) as engine:
            check_all(engine.generate(*prompts(530)), right, cached=cached)
            engine.flush()


def test_layers_with_states_are_not_cut_and_the_engine_says_so(tmp_path_factory: pytest.TempPathFactory, store: Cluster) -> None:
    model = make_model(tmp_path_factory, "states")
    with Engine(model, store=PATIENT | {"master": store.address, "share_tp": 2, "salt": "states"}, **HYBRID) as engine:
        (computed,) = engine.generate(prompt(540, BLOCKS))
        engine.flush()
        engine.forget()
        (loaded,) = engine.generate(prompt(540, BLOCKS))
        assert loaded.tokens == computed.tokens
        assert (computed.cached, loaded.cached) == (0, BLOCKS * BLOCK_TOKENS)
        assert engine.log_lines("caches of kind MambaSpec cannot be split by heads: only engines with the same TP, 1, share blocks")


def test_impossible_share_tp_is_rejected_with_possible_numbers(heads_model: Path, store: Cluster) -> None:
    with pytest.raises(AssertionError, match=r"share_tp is 3: .* 8 KV heads on 1 .* takes 1, 2, 4, 8, 0 \(off\)"):
        with Engine(heads_model, store=PATIENT | {"master": store.address, "share_tp": 3}):
            pass
