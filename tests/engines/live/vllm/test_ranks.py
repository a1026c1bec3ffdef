"""Engines of several ranks, each a process: a prompt is found where those of all ranks have it."""

from pathlib import Path
from typing import Any

import pytest

from tests.client.processes import Cluster
from tests.engines.live.vllm.engines import BLOCK_TOKENS, PATIENT, Engine, prompt

BLOCKS = 5


@pytest.mark.timeout(900)  # two engines of two processes each, which begin within it
def test_a_prompt_that_two_ranks_computed_is_found_by_two_others(model: Path, store: Cluster, plain: Engine) -> None:
    """Tensor parallelism. With two pipeline ranks vLLM 0.32.0 on a CPU does not run eagerly: the second has no `intermediate_tensors`."""
    asked = prompt(300, BLOCKS)
    plain.forget()
    (right,) = plain.generate(asked)
    options: dict[str, Any] = {"tensor_parallel_size": 2, "store": PATIENT | {"master": store.address}}
    with Engine(model, **options) as first:
        (cold,) = first.generate(asked)
        cold.check_same(right)
        assert cold.cached == 0
        first.flush()
    with Engine(model, **options) as second:
        (warm,) = second.generate(asked)
        warm.check_same(right)
        assert warm.cached == BLOCKS * BLOCK_TOKENS
