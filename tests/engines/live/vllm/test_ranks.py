"""Engines of several ranks, each a process: a prompt is found where those of all ranks have it."""

from pathlib import Path
from typing import Any

import pytest

from tests.client.processes import Cluster
from tests.engines.live.vllm.engines import BLOCK_TOKENS, PATIENT, Answer, Engine, prompt

BLOCKS = 5
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
"""Without the compilation, whose warm-up makes them, a second rank of vLLM 0.32.0 on a CPU has no `intermediate_tensors` to receive into;
traced once, by no compiler that takes its time."""


@pytest.mark.parametrize("ranks", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_prompts_that_two_ranks_computed_are_found_by_two_others(model: Path, store: Cluster, plain: Engine, ranks: dict[str, Any]) -> None:
    """Several at once: of a pipeline's steps one begins before the outcome of the last one is known."""
    asked = [prompt(seed, BLOCKS) for seed in range(300, 303)]
    plain.forget()
    right = plain.generate(*asked)
    options = ranks | {"store": PATIENT | {"master": store.address}}
    for cached in (0, BLOCKS * BLOCK_TOKENS):
        with Engine(model, **options) as engine:
            for answer, wanted in zip(engine.generate(*asked), right, strict=True):
                answer.check_same(wanted)
                assert answer.cached == cached
            engine.flush()
            if cached:
                check_named(engine, asked, right)


def check_named(engine: Engine, asked: list[list[int]], right: list[Answer]) -> None:
    """All ranks store and load by another version of the weights once it is named, none before."""
    engine.tell("name", version="v1")
    for cached in (0, BLOCKS * BLOCK_TOKENS):
        engine.forget()
        for answer, wanted in zip(engine.generate(*asked), right, strict=True):
            answer.check_same(wanted)
            assert answer.cached == cached
        engine.flush()
